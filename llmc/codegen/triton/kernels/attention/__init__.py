"""Paged attention, and what writes the KV cache that it reads."""
