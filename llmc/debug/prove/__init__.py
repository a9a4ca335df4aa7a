"""Proofs of rewrites: what stands before one and after it, evaluated over symbols, is the same over the reals."""
