"""Adapters beside the weights, while an engine runs."""
