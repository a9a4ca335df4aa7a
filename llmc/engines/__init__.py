"""The engine that a model argument stands for: given, found in the cache, or built now; and LLM over it."""
