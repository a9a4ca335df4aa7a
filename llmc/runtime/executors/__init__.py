"""What computes a step: compiled code, or the graph itself."""
