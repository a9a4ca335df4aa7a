"""Adapters of a running engine."""
