"""Models that are objects in memory: torch modules and exported programs."""
