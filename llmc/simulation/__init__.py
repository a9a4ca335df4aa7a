"""What to rent: the real scheduler on a virtual clock, for every way to divide a number of ranks."""
