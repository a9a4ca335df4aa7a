"""Fusions of what models write out in aten: it becomes one llmc:: op, while the graph is made canonical."""
