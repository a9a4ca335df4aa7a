"""Measure what an engine carries on this machine's GPU, and keep the fastest."""
