"""Passes that make weights, activations and the KV cache smaller."""
