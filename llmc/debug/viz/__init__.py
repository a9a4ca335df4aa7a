"""`llmc viz`: the graph of one stage, for other viewers."""
