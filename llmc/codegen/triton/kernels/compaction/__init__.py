"""Kernels that score and move rows of a request's KV cache between two steps (llmc/ops/compact_kv.py)."""
