"""Numbers that a request draws: its own whatever runs beside it, and the same on the host as in the CPU's kernel.

Philox 4x32 with ten rounds (Salmon, Moraes, Dror and Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3").
"""

from __future__ import annotations

_WORD = 0xFFFFFFFF


def uniform(seed: int, counter: int) -> float:
    """One number in [0, 1), of 53 bits, for each pair of int32. Its first 24 are those of llmc.ops.sampling.uniform."""
    words = (counter & _WORD, 0, 0, 0)
    low, high = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(10):
        even, odd = 0xD2511F53 * words[0], 0xCD9E8D57 * words[2]
        words = (odd >> 32 ^ words[1] ^ low, odd & _WORD, even >> 32 ^ words[3] ^ high, even & _WORD)
        low, high = (low + 0x9E3779B9) & _WORD, (high + 0xBB67AE85) & _WORD
    folded = words[0] ^ _WORD if words[0] >> 31 else words[0]
    return (folded << 22 | words[1] >> 10) * 2.0**-53
