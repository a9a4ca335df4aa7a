"""What a model can come from, and how each becomes one captured graph and a source of its weights."""
