"""The default thread count."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from llmc.errors import OptionError
from llmc.runtime.threads import available_cores, thread_count
from llmc.settings import settings


@pytest.fixture(autouse=True)
def fresh_settings() -> Iterator[None]:
    settings.cache_clear()
    yield
    settings.cache_clear()


def test_cores_within_the_affinity() -> None:
    before = os.sched_getaffinity(0)
    assert 1 <= available_cores() <= len(before)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert available_cores() == 1
    finally:
        os.sched_setaffinity(0, before)


def test_the_argument_goes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMC_THREADS", "3")
    assert thread_count(None) == 3
    assert thread_count(2) == 2


@pytest.mark.parametrize("value", ["0", "many", "-1"])
def test_a_bad_environment_is_an_error(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("LLMC_THREADS", value)
    with pytest.raises(OptionError, match="LLMC_THREADS cannot be"):
        thread_count(None)
