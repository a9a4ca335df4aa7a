"""Passes that take whole channels, heads and layers out of a model, and leave a smaller dense graph."""
