"""Alternating measurement: each round asks every contestant in turn, another one first, after one warm-up round."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

ROUNDS = 5


@dataclass(frozen=True)
class Sample:
    """Seconds of each round; `spread` is (max - min) / median."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        return (max(self.seconds) - min(self.seconds)) / self.median

    def paired_ratio(self, other: Sample) -> float:
        """The median of what each round took by what the other took in the same round."""
        return statistics.median(mine / its for mine, its in zip(self.seconds, other.seconds, strict=True))


def alternate(runs: Mapping[str, Callable[[], float]], rounds: int = ROUNDS) -> dict[str, Sample]:
    """`rounds` measured rounds of every run, in turn, after an unmeasured one. Each round begins with the run that was
    second in the one before: what a place in a round does to a time is not always the same run's."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for round_number in range(rounds + 1):
        first = round_number % len(names)
        for name in names[first:] + names[:first]:
            measured = runs[name]()
            if round_number > 0:
                seconds[name].append(measured)
    return {name: Sample(tuple(values)) for name, values in seconds.items()}


@contextmanager
def busy_core() -> Iterator[None]:
    """Another process that keeps one core busy, as a neighbour does."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()
