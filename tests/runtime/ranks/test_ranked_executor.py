"""Engines of several ranks compute what one process computes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llmc.engine_format.reader import read_engine
from llmc.runtime.engine import Engine
from llmc.runtime.kv_capacity import cache_bytes
from llmc.runtime.loading import load
from llmc.runtime.sampling.sampling_params import SamplingParams
from tests.runtime.ranks.conftest import NewEngine
from tests.tiny_models import tiny_tokens

PROMPTS = [tiny_tokens(33), tiny_tokens(7), tiny_tokens(1), tiny_tokens(18)[::-1]]


@pytest.fixture(params=[2, 3])
def path(request: pytest.FixtureRequest, of_ranks: NewEngine) -> Path:
    return of_ranks(request.param)


def test_logits_and_greedy_tokens_are_those_of_one_rank(alone: Engine, path: Path) -> None:
    with load(path, threads=1) as engine:
        for prompt in PROMPTS:
            expected, actual = alone.logits(prompt), engine.logits(prompt)
            assert float(np.abs(actual - expected).max()) <= 1e-4 * float(np.ptp(expected))
        sampling = SamplingParams(max_tokens=48, temperature=0.0)
        expected_tokens = [c.token_ids for c in alone.generate(PROMPTS, sampling)]
        assert [c.token_ids for c in engine.generate(PROMPTS, sampling)] == expected_tokens


def test_forks_and_bits_among_neighbours(path: Path) -> None:
    """Blocks are copied on every rank, and a request's tokens do not depend on what runs beside it."""
    sampling = SamplingParams(max_tokens=24, temperature=0.9, seed=5, n=3)
    with load(path, threads=1) as engine:
        by_itself = engine.generate([PROMPTS[0]], sampling)[0]
        among = engine.generate(PROMPTS, sampling)[0]
        assert by_itself == among


def test_little_room_and_prefixes_that_are_known(alone: Engine, path: Path) -> None:
    """Requests are preempted and computed again, and a prompt's beginning is found in the cache, on every rank."""
    sampling = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    prompts = [tiny_tokens(60), tiny_tokens(60)[::-1], tiny_tokens(50), tiny_tokens(44)[::-1]]
    expected = [c.token_ids for c in alone.generate(prompts, sampling)]
    program = read_engine(path).program
    with load(path, threads=1, kv_cache_bytes=cache_bytes(9, program)) as engine:
        assert [c.token_ids for c in engine.generate(prompts, sampling)] == expected
        assert engine.loop.scheduler.preemptions > 0
    with load(path, threads=1) as engine:
        assert [c.token_ids for c in engine.generate(prompts, sampling)] == expected
        hits = engine.loop.scheduler.prefix_cache.hits
        assert [c.token_ids for c in engine.generate(prompts, sampling)] == expected
        assert engine.loop.scheduler.prefix_cache.hits > hits
