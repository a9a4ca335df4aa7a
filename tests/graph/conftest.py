"""Here graphs are captured, not found in the cache: that is what is tested."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from llmc.settings import settings


@pytest.fixture(autouse=True)
def captured_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The setting that users have: a process that has imported transformers, as this one, captures by itself."""
    monkeypatch.delenv("LLMC_CAPTURE_CACHE", raising=False)
    settings.cache_clear()
    yield
    settings.cache_clear()
