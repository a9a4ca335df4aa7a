"""One process per contestant, driven over pipes, so that the runs alternate and each has its own environment."""
