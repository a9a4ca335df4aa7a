"""OpenAI's Responses API for text: items in, items out, and typed events."""
