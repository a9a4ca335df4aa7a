"""Each op in standard ops of ONNX, one file per family of ops."""
