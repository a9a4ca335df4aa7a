"""Proofs of rewrites: the graphs before and after a rewrite, evaluated over symbols, are equal over the reals."""
