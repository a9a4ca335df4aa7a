"""Engines of several ranks: one process each, which run every step together."""
