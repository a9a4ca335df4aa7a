"""The part of each weight that each rank holds."""
