"""How long GPUs of one machine take to exchange values, α + bytes / β: of the ranks' own memory, and of NCCL.

Published for four H100s with NVLink: 0.5 MB one-shot 10 µs and by NCCL 21 µs, 2 MB by NCCL 43 µs (vllm#24532, #24111).
"""

from __future__ import annotations

_MEMORY_BEGINNING, _MEMORY_BANDWIDTH = 5e-6, 300e9
_LIBRARY_BEGINNING, _LIBRARY_BANDWIDTH = 10e-6, 150e9


def memory_seconds(nbytes: int, ranks: int) -> float:
    """Of values of so many bytes, of which every rank reads those of all others."""
    return _MEMORY_BEGINNING + (ranks - 1) * nbytes / _MEMORY_BANDWIDTH


def library_seconds(nbytes: int) -> float:
    """Of so many bytes that each rank receives."""
    return _LIBRARY_BEGINNING + nbytes / _LIBRARY_BANDWIDTH
