"""What running on a GPU takes beside the executor: its program, memory, inputs and binaries."""
