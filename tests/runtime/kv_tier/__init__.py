"""Tests of the second tier."""
