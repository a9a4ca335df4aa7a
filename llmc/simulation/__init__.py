"""Capacity planning: the real scheduler on a virtual clock, for every division of a number of ranks."""
