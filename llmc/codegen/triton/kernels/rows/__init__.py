"""Kernels that work on rows one by one: lookups, norms, rotations, gates."""
