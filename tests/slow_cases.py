"""Of what is alike, the cases that `make test` leaves to `make test-slow`: chosen by what each costs (slow_cases.txt).

A line is a test, or one case of it. What stays quick still runs the code that these do.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

LISTED = Path(__file__).with_suffix(".txt")


def slow_cases() -> frozenset[str]:
    """The lines."""
    return frozenset(LISTED.read_text(encoding="utf-8").splitlines())


def mark_slow_cases(items: Iterable[pytest.Item]) -> None:
    """Of those that were collected."""
    listed = slow_cases()
    for item in items:
        if item.nodeid in listed or item.nodeid.partition("[")[0] in listed:
            item.add_marker(pytest.mark.slow)
