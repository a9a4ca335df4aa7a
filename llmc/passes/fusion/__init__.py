"""Fusion passes: here for neighbours in a serving graph, in from_aten/ for ops that models write in aten."""
