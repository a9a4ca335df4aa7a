"""How a process that measures has ended."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.gpu.measurement import Measurement


@dataclass(frozen=True)
class Outcome:
    """How a job ended. status: ok, failed, timed out, or why it did not run. tail: its last lines, unless ok."""

    job: str
    status: str
    seconds: float
    measurements: tuple[Measurement, ...]
    tail: str = ""
