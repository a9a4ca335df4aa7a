"""A contestant prepares at once and measures when it is told to; one that fails or hangs is an outcome too."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from benchmarks.gpu.contestant import Contestant
from benchmarks.gpu.measurement import Measurement

MEASURES = """
from benchmarks.gpu.measurement import Measurement, report
from pathlib import Path
Path({0!r}).touch()
print("ready", flush=True)
assert input() == "go"
report(Measurement("g", "c", "llmc", (1.0,)))
"""


def contestant(code: str, seconds: float = 600.0) -> Contestant:
    return Contestant("c", [sys.executable, "-c", code], time.monotonic() + seconds)


def test_contestants_measure_in_turn(tmp_path: Path) -> None:
    files = [tmp_path / "a", tmp_path / "b"]
    both = [contestant(MEASURES.format(str(file))) for file in files]
    assert all(other.prepared() is not None for other in both)
    assert all(file.exists() for file in files)
    for competitor in both:
        outcome = competitor.measured()
        assert (outcome.status, outcome.tail) == ("ok", "")
        assert outcome.measurements == (Measurement("g", "c", "llmc", (1.0,)),)


def test_one_that_fails_says_why() -> None:
    failing = contestant("raise SystemExit('broken')")
    assert failing.prepared() is None
    outcome = failing.measured()
    assert outcome.status == "failed with exit code 1"
    assert "broken" in outcome.tail


def test_one_that_hangs_is_killed() -> None:
    assert contestant("print('ready', flush=True); input(); input()", seconds=0.0).measured().status == "timed out"
