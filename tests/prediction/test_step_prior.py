"""How the time of a step grows with its tokens, before anything was measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmc.engine_format import read_engine
from llmc.prediction.step_prior import step_prior
from llmc.targets import REFERENCE
from tests.runtime.tiny_engine import tiny_model, tiny_program


def test_a_few_tokens_cost_little_more_than_one_and_many_cost_in_proportion(draft_engine: Path) -> None:
    engine = read_engine(draft_engine, check_weights=False)
    seconds = step_prior(engine.program, engine.manifest.target.name)
    assert seconds is not None
    times = [seconds(tokens) for tokens in (1, 2, 4, 32, 64)]
    assert times == sorted(times)
    assert times[1] < 1.3 * times[0] and times[4] == pytest.approx(2 * times[3], rel=0.15)


def test_nothing_is_predicted_of_torch() -> None:
    assert step_prior(tiny_program(tiny_model()), REFERENCE.name) is None
