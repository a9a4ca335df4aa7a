"""Outputs that follow a grammar: grammars are compiled in separate processes and applied as masks over tokens."""
