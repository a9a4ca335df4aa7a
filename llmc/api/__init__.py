"""What the functions of the Python API have in common: their signatures, their progress, the version."""
