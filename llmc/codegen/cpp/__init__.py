"""The C++ backend: printer, hand-written kernels and how both are compiled."""
