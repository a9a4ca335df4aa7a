"""ONNX files: the graph and its tensors, read without trust, and what each operator is in torch's and llmc's words."""
