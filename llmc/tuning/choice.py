"""What is chosen of several that were measured."""

from collections.abc import Mapping
from dataclasses import dataclass

# A variant has to be faster by this much: less is noise.
LEAST_GAIN = 0.03


@dataclass(frozen=True)
class Tuned:
    """Seconds of a choice as it was, and of what was chosen (the same if nothing was). what: now launched there.

    kernel: the one that was launched there before. num_warps, num_stages: of what is now.
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
