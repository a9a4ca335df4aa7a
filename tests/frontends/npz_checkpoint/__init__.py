"""A checkpoint format that llmc does not have: a NumPy archive beside config.json."""
