"""Passes that change how attention is computed, and what of keys and values is kept."""
