"""Architectures of GGUF files, one file a family: config.json's content, and where each of the model's tensors is."""
