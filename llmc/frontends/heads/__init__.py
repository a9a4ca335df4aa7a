"""Models that give a row for a whole text: which task a directory is for, how it pools, and what is captured of it."""
