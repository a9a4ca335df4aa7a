"""`llmc bench`: load on a server, and what an engine does without one, measured and summarized."""
