"""Tests of the passes that take channels, heads and layers out."""
