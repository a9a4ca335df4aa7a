"""Outputs that follow a grammar: compiled in their own processes, held by masks."""
