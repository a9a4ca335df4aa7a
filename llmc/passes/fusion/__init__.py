"""Passes that merge neighbouring ops of a serving graph into fused ones."""
