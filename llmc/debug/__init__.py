"""Seeing what the compiler did: comparison with the original model, checks of passes, explanations."""
