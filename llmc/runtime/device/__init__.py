"""Parts of running on a GPU apart from the executor: programs, memory, inputs and binaries."""
