"""Predicted times of launches and steps, from their costs and the rates of a machine."""
