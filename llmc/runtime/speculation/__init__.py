"""Speculative decoding: drafts of what may come next, read by the model in the step that would give one token."""
