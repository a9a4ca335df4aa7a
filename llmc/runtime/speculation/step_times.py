"""Times of steps by size: measured, or predicted and corrected by measurements of other sizes."""

import bisect
from collections.abc import Callable

# Weights of the last value in an average, if it is larger and if it is smaller: disturbances only make steps longer.
_LONGER, _SHORTER = 0.2, 0.4
# Steps after which times are measured again: a size that was slow once, perhaps by chance, is not used otherwise.
_REMEMBERED_STEPS = 1024
# Maximum ratio of two sizes that count as similar.
_ALIKE = 1.25

# Seconds of a step of that size, perhaps all wrong by the same factor.
Prior = Callable[[int], float]


class StepTimes:
    """Measured and predicted times of steps. prior: predicted times. If it is None, a step of an unobserved size is
    assumed to take the minimum possible time: that of the next smaller size, or below all sizes a proportional time.
    Options that might be better are therefore tried once."""

    def __init__(self, prior: Prior | None = None) -> None:
        self._prior = prior
        self._sizes: list[int] = []
        self._measured: dict[int, float] = {}
        self._times: dict[int, int] = {}
        self._steps = 0

    def note(self, size: int, seconds: float) -> None:
        """Record the time of a step of that size."""
        self._steps += 1
        if self._steps % _REMEMBERED_STEPS == 0:
            self.forget()
        known = self._measured.get(size)
        # One that was held up counts as twice the usual at most.
        usual = known if self._prior is None else self.seconds(size)
        seconds = seconds if usual is None else min(seconds, 2 * usual)
        if known is None:
            bisect.insort(self._sizes, size)
            self._measured[size] = seconds
        else:
            weight = _LONGER if seconds > known else _SHORTER
            self._measured[size] += weight * (seconds - known)
        self._times[size] = self._times.get(size, 0) + 1

    def forget(self) -> None:
        """Measure all sizes again."""
        for known in (self._sizes, self._measured, self._times):
            known.clear()

    def times(self, size: int) -> int:
        """Number of measurements of similar sizes."""
        first = bisect.bisect_left(self._sizes, size / _ALIKE)
        return sum(self._times[near] for near in self._sizes[first : bisect.bisect(self._sizes, size * _ALIKE)])

    def seconds(self, size: int) -> float | None:
        """Return the seconds of a step of that size; None before the first step.

        Not more than for a larger size: if the larger one took less, the smaller one was disturbed.
        """
        if not self._sizes:
            return None
        own = self._own_seconds(size)
        larger = self._sizes[bisect.bisect_right(self._sizes, size) :]
        return min(own, *(self._measured[other] for other in larger)) if larger else own

    def _own_seconds(self, size: int) -> float:
        known = self._measured.get(size)
        if known is not None:
            return known
        index = bisect.bisect_right(self._sizes, size)
        nearest = self._sizes[max(0, index - 1)]
        if self._prior is not None:
            if 0 < index < len(self._sizes) and size * size > nearest * self._sizes[index]:
                nearest = self._sizes[index]
            return self._prior(size) * self._measured[nearest] / self._prior(nearest)
        return self._measured[nearest] * (1.0 if index else size / nearest)
