"""Mixtures of experts: pairs of tokens and experts put in order, and products with what each token was sent to."""
