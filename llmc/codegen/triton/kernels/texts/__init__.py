"""Models that read whole texts: attention to both sides, pooling, and which text of a pair a token is of."""
