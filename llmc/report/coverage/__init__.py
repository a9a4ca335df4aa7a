"""Coverage: the parts of a model that the passes rewrote, and those they left."""
