"""Shared parts of the Python API's functions: signatures, progress, the version."""
