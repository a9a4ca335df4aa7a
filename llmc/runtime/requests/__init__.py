"""Clients' requests: the scheduler's request per sequence, its states, and its outputs."""
