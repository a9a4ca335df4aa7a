"""Of what is alike, the cases that `make test` leaves to `make test-slow`: chosen by what each costs (slow_cases.txt).

A line is a test, or one case of it. What stays quick still reaches what these do: `make mutants` says so.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

LISTED = Path(__file__).with_suffix(".txt")


def mark_slow_cases(items: Iterable[pytest.Item], *, is_whole: bool) -> None:
    """is_whole: all tests were collected. Then a line that names none of them is an error: it would be forgotten. Cases
    are not asked for: some are of a kind of processor, or of a GPU."""
    listed = set(LISTED.read_text(encoding="utf-8").splitlines())
    found = set()
    for item in items:
        test = item.nodeid.partition("[")[0]
        found.add(test)
        if item.nodeid in listed or test in listed:
            item.add_marker(pytest.mark.slow)
    gone = sorted({name.partition("[")[0] for name in listed} - found)
    if is_whole and gone:
        raise pytest.UsageError(f"{LISTED} names tests that are not there: {', '.join(gone)}")
