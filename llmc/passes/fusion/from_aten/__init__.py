"""Fusions of aten ops into one llmc:: op, while the graph is made canonical."""
