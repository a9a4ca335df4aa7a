"""Kernels that read and write what recurrent layers carry from token to token."""
