"""Which tokens of which requests the next step computes, and in which blocks of the KV cache."""
