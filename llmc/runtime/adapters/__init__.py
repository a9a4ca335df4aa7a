"""Adapters beside the weights of a running engine."""
