"""Pydantic models of requests. They are closed, so that a misspelled field is an error instead of being ignored."""
