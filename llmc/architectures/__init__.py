"""What of transformers compiles: a tiny random model of every causal architecture, built and compared."""
