"""Ranks that choose tokens together, without logits on any of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmc.program import StepOutput
from llmc.runtime.engine import Engine
from llmc.runtime.loading import load
from llmc.runtime.loop.step import Step
from llmc.runtime.ranks.ranked_executor import RankedCppExecutor
from llmc.runtime.sampling.row_choice import BEST, EVERY_TOKEN, RowChoice, RowChoices, least_wanted
from llmc.runtime.sampling.sampling_params import SamplingParams
from tests.runtime.ranks.conftest import NewEngine
from tests.tiny_models import tiny_tokens

PROMPT = tiny_tokens(24)
DRAWN = RowChoice(1.3, EVERY_TOKEN, 1.0, 0.0, 5, 7)


@pytest.fixture(scope="module", params=[2, 3])
def engine(request: pytest.FixtureRequest, of_ranks: NewEngine) -> Any:
    with load(of_ranks(request.param), threads=1) as opened:
        yield opened


def executor_of(engine: Engine) -> RankedCppExecutor:
    executor = engine.loop.executor
    assert isinstance(executor, RankedCppExecutor)
    return executor


def prompt_step() -> Step:
    """The whole prompt, with logits of each token."""
    count = len(PROMPT)
    rows = np.arange(count, dtype=np.int32)
    return Step(
        input_ids=np.array(PROMPT, np.int32),
        positions=rows,
        slot_mapping=rows,
        query_starts=np.array([0, count], np.int32),
        context_lens=np.array([count], np.int32),
        block_tables=np.arange(2, dtype=np.int32)[None],
        logit_rows=rows,
        tree_masks=np.zeros(count, np.int64),
    )


@pytest.mark.parametrize("choices", [[BEST], [BEST, DRAWN], [DRAWN]], ids=["best", "both", "drawn"])
def test_tokens_without_logits_are_those_of_logits(engine: Engine, choices: list[RowChoice]) -> None:
    """And no logits come: what lay in their place is still there."""
    executor, step = executor_of(engine), prompt_step()
    given = [choices[row % len(choices)].later(row) for row in range(len(PROMPT))]
    logits = executor.step(step).copy()
    expected = executor.draw(logits, RowChoices.of(given))
    executor.own_output.fill(np.nan)
    chosen = executor.choose(step, least_wanted(given), RowChoices.of(given))
    assert chosen.tokens.tolist() == expected.tolist()
    assert chosen.scores.tolist() == logits.max(1).tolist()
    assert chosen.covered.all() and np.isnan(executor.own_output).all()


@pytest.mark.parametrize("row", [None, RowChoice(1.0, 3, 1.0, 0.0, 5, 0), RowChoice(1.0, EVERY_TOKEN, 0.9, 0.0, 5, 0)])
def test_logits_come_where_one_row_wants_them(engine: Engine, row: RowChoice | None) -> None:
    executor, step = executor_of(engine), prompt_step()
    given = [BEST, DRAWN, row] * (len(PROMPT) // 3)
    logits = executor.step(step).copy()
    executor.own_output.fill(np.nan)
    chosen = executor.choose(step, least_wanted(given), RowChoices.of(given))
    assert np.array_equal(executor.logits(0, len(PROMPT)), logits)
    assert chosen.tokens.tolist() == executor.draw(logits, RowChoices.of(given)).tolist()


def test_logits_come_after_all_where_a_row_has_no_likeliest_token(engine: Engine) -> None:
    """What is not finite is told of by its logits, which the ranks gather in a second step."""
    executor, step = executor_of(engine), prompt_step()
    later = replace(step, positions=step.positions + 16, slot_mapping=step.slot_mapping + 16)
    later = replace(later, context_lens=step.context_lens + 16, block_tables=np.arange(3, dtype=np.int32)[None])
    given = [BEST] * len(PROMPT)
    cached = next(iter(executor._caches.values())).view(np.float32)
    before = cached.copy()
    try:
        cached.fill(np.nan)  # A rank's keys, as sums of one that computes wrong would leave them.
        chosen = executor.choose(later, least_wanted(given), RowChoices.of(given))
        assert not np.isfinite(chosen.scores).any()
        logits = executor.logits(0, len(PROMPT))
        assert logits.shape[0] == len(PROMPT) and np.isnan(logits).any()
    finally:
        cached[:] = before
    assert np.isfinite(executor.choose(step, least_wanted(given), RowChoices.of(given)).scores).all()


def test_requests_of_all_kinds_get_the_same_tokens(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """By themselves, where ranks choose, and among others, some of which want logits: bit for bit."""
    common: dict[str, Any] = {"max_tokens": 16, "ignore_eos": True}
    kinds = [
        SamplingParams(temperature=0.0, **common),
        SamplingParams(temperature=1.5, seed=3, **common),
        SamplingParams(temperature=1.5, seed=3, top_p=0.9, **common),
        SamplingParams(temperature=1.5, seed=3, repetition_penalty=1.3, **common),
        SamplingParams(temperature=0.0, logprobs=2, **common),
    ]
    prompts = [PROMPT[:9]] * len(kinds)
    wanted: list[StepOutput | None] = []
    executor = executor_of(engine)
    run_choosing = executor.run_choosing

    def noted(step: Step, choices: RowChoices) -> None:
        wanted.append(StepOutput.DRAWN if choices.temperature.any() else StepOutput.BEST)
        run_choosing(step, choices)

    monkeypatch.setattr(executor, "run_choosing", noted)
    alone = [engine.generate([prompt], kind)[0] for prompt, kind in zip(prompts, kinds, strict=True)]
    assert len(wanted) == 2 * 16 and set(wanted) == {StepOutput.BEST, StepOutput.DRAWN}
    assert engine.generate(prompts, kinds) == alone
    assert len(wanted) == 2 * 16


def test_an_engine_of_an_older_llmc_gathers_logits(of_ranks: NewEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its library has no such step."""
    sampling = SamplingParams(max_tokens=8, temperature=0.0)
    path: Path = of_ranks(2)
    with load(path, threads=1) as engine:
        expected = engine.generate([PROMPT], sampling)
        executor = executor_of(engine)
        monkeypatch.setattr(executor, "_chooses_across", False)
        executor.own_output.fill(np.nan)
        assert engine.generate([PROMPT], sampling) == expected
        assert not np.isnan(executor.own_output[0]).any()
