"""llmc: an ahead-of-time compiler for LLM inference."""
