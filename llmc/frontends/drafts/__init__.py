"""Checkpoints of layers that draft tokens from a target model's hidden states: one file a layout, and their modules."""
