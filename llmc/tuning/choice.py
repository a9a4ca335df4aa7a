"""The choice among measured alternatives."""

from collections.abc import Mapping
from dataclasses import dataclass

# A variant has to be faster by this much: less is noise.
LEAST_GAIN = 0.03


@dataclass(frozen=True)
class Tuned:
    """Seconds of the previous choice, and of the new one (the same if nothing changed). what: the kernel launched now.

    kernel: the kernel launched before. num_warps, num_stages: those of the kernel launched now.
    """

    kernel: str
    what: str
    before: float
    after: float
    num_warps: int
    num_stages: int


def fastest(seconds: Mapping[str, float], own: str) -> str:
    """The name with the least time, or `own` if none is faster by LEAST_GAIN."""
    best = min(seconds, key=lambda name: seconds[name])
    return best if seconds[best] < seconds[own] * (1 - LEAST_GAIN) else own
