"""Mixtures of experts: sorting pairs of tokens and experts, and products of tokens with their experts."""
