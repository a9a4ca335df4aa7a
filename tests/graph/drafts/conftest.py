"""Drafts are read, not captured: the models that they are for may be found in the cache."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def captured_anew() -> None:
    """In the place of the fixture of all other tests of graphs."""
