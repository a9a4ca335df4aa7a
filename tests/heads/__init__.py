"""Models that give a row for a whole text."""
