"""What each op is in standard ops of ONNX, one file a family of ops."""
