"""Alternating measurement: each round asks every contestant in turn, after one warm-up round."""

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


def alternate(runs: Mapping[str, Callable[[], float]], rounds: int = ROUNDS) -> dict[str, Sample]:
    """`rounds` measured rounds of every run, in turn, after an unmeasured one."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for round_number in range(rounds + 1):
        for name, run in runs.items():
            measured = run()
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
