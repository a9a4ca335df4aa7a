"""Blocks of the KV cache by the tokens that they hold."""
