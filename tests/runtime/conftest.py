"""Speculation that does not depend on how fast the machine is."""

from __future__ import annotations

import pytest

from llmc.runtime.speculation import opening
from tests.runtime.speculation.guesses import Open


@pytest.fixture
def open_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that are loaded draft as much as there is room for."""
    monkeypatch.setattr(opening, "Gate", Open)
