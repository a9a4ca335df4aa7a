"""Speculation that does not depend on how fast the machine is."""

from __future__ import annotations

from functools import partial

import pytest

from llmc.runtime.speculation import opening
from llmc.runtime.speculation.speculation import Speculation
from tests.runtime.speculation.guesses import Open


@pytest.fixture
def open_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that are loaded draft as much as there is room for."""
    monkeypatch.setattr(opening, "Speculation", partial(Speculation, new_gate=Open))
