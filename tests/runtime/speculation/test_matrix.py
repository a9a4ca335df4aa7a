"""No drafter changes an answer: tokens, texts, bits of log-probabilities and reasons to stop are the same, alone, among
neighbours, and where room is short. The formats other than one are for `make test-slow`."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from llmc import load
from tests.runtime.speculation.matrix import (
    DRAFTERS,
    FORMATS,
    OPTIONS,
    PROMPTS,
    QUICK,
    Engines,
    asked,
    one_by_one,
    told,
)

pytestmark = pytest.mark.usefixtures("open_gate")


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    return Engines(tmp_path_factory.mktemp("formats"))


def test_answers_are_those_without_drafts(engines: Engines) -> None:
    """Of the drafter that needs nothing trained; tests beside this one have each of the others."""
    check(engines, "suffix", QUICK, PROMPTS[2:3])


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_answers_in_every_format_are_those_without_drafts(engines: Engines, drafter: str, form: str) -> None:
    """Each request alone, and each among more than 32 neighbours."""
    assert len(PROMPTS) * len(OPTIONS) > 33
    check(engines, drafter, form, PROMPTS)


def check(engines: Engines, drafter: str, form: str, prompts: Sequence[str]) -> None:
    path, speculation = DRAFTERS[drafter](engines, form)
    texts, params = asked(prompts)
    expected = engines.answers(path, texts, params)
    with load(path, speculation=speculation) as engine:
        assert one_by_one(engine, texts, params) == expected, "alone"
        assert engine.loop.speculation is not None and engine.loop.speculation.stats.accepted_tokens > 5
        assert [told(completion) for completion in engine.generate(texts, params)] == expected, "among neighbours"
    room = 3_000_000 if form == "fp32" else 1_500_000
    with load(path, speculation=speculation, kv_cache_bytes=room, max_step_tokens=40, max_sequences=12) as engine:
        assert [told(completion) for completion in engine.generate(texts, params)] == expected, "with little room"
        assert engine.loop.pool.used == 0
