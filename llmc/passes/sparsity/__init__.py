"""Passes that make elements of weights zero, find those that are, and store weights without them."""
