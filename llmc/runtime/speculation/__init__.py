"""Speculative decoding: drafts of the next tokens, verified by the model in the step that would give one token."""
