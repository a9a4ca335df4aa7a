"""Scheduling: the tokens and requests of the next step, and their blocks of the KV cache."""
