"""Checkpoints whose weights are codes: what their files say of them, and how each published layout is unpacked."""
