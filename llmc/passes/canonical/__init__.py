"""Passes from the captured graph to llmc:: ops over tokens."""
