"""Passes that recognise attention and put its keys and values into a paged cache."""
