"""Adapters that are loaded while an engine runs."""
