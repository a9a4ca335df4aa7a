"""Outputs that follow a grammar: compiled in processes of their own, held by masks."""
