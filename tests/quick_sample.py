"""Of many alike, the few that `make test` runs; the others are for the slow tests."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def quick_sample(cases: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """All cases for parametrize, those that are not among the quick ones marked slow. A tuple is several values."""
    return [case if case in quick else _slow(case) for case in cases]


def _slow(case: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
