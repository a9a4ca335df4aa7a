"""What requests may hold: pydantic models, closed, so that a misspelled field is an error and not ignored."""
