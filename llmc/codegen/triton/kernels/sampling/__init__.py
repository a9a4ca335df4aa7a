"""Choosing a token of each row of logits."""
