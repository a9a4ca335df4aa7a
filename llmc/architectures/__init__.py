"""Coverage of transformers: a tiny random model of every causal architecture is built and compared."""
