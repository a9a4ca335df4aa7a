"""Models that transformers describes: a directory with config.json, or a model in memory."""
