"""What of a model the passes reached, and what they left."""
