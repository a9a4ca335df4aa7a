"""No drafter changes an answer: tokens, texts, bits of log-probabilities and reasons to stop are the same, alone, among
neighbours, and where room is short. The formats other than one are for `make test-slow`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from llmc import load
from tests.runtime.speculation.matrix import DRAFTERS, FORMATS, MORE, PROMPTS, QUICK, Engines, asked, one_by_one, told

pytestmark = pytest.mark.usefixtures("open_gate")


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    return Engines(tmp_path_factory.mktemp("formats"))


def _slow(names: Iterable[str], quick: Callable[[str], bool]) -> list[Any]:
    return [name if quick(name) else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("form", _slow(FORMATS, lambda form: form == QUICK))
@pytest.mark.parametrize("drafter", _slow(DRAFTERS, lambda drafter: drafter not in MORE))
def test_answers_are_those_without_drafts(engines: Engines, drafter: str, form: str) -> None:
    path, speculation = DRAFTERS[drafter](engines, form)
    prompts, params = asked(PROMPTS[:2] if form == QUICK else PROMPTS)
    expected = engines.answers(path, prompts, params)
    with load(path, speculation=speculation) as engine:
        assert one_by_one(engine, prompts, params) == expected, "alone"
        assert engine.loop.speculation is not None and engine.loop.speculation.stats.accepted_tokens > 5
        assert [told(each) for each in engine.generate(prompts, params)] == expected, "among neighbours"
    room = 3_000_000 if form == "fp32" else 1_500_000
    with load(path, speculation=speculation, kv_cache_bytes=room, max_step_tokens=40, max_sequences=12) as engine:
        assert [told(each) for each in engine.generate(prompts, params)] == expected, "with little room"
        assert engine.loop.pool.used == 0
