"""What a statement with a probe before it says: which test, or file of tests, has reached it, in whatever process.
And, as a plugin of pytest, how long each test takes."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest import TestReport

RECORD = Path(__file__).parent.parent.parent / "build" / "reached.tsv"


def reached(key: str) -> None:
    """Called before the statement of a mutant runs. A process that a test starts has the test's name, too."""
    test, _, phase = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")
    if phase == "(setup)":
        _record(key, test.partition("::")[0])  # What a fixture makes is looked at by any test of the file.
    elif test and phase != "(teardown)":
        _record(key, test)


def pytest_runtest_logreport(report: TestReport) -> None:
    """Seconds of a test, or of what it needs first."""
    _record(f"{report.duration:.3f}s {report.when}", report.nodeid)


@cache
def _record(*fields: str) -> None:
    with RECORD.open("a", encoding="utf-8") as file:
        file.write("\t".join(fields) + "\n")
