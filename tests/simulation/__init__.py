"""The scheduler on a virtual clock, and what it says should be rented."""
