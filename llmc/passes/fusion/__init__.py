"""Passes that make one op of several: here of a serving graph's neighbours, in from_aten/ of what models write out."""
