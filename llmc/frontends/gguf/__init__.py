"""GGUF files, llama.cpp's: the container, what its metadata say in a model directory's words, and its tensors."""
