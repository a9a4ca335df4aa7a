"""Passes that make the graph of one sequence serve steps of many requests."""
