"""Processes that llmc starts and ends with itself."""
