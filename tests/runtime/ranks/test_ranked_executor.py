"""Engines of several ranks: what one process computes, and what happens when one of them is lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from llmc.compiler import build
from llmc.errors import LlmcError
from llmc.runtime.engine import Engine
from llmc.runtime.loading import load
from llmc.runtime.sampling.sampling_params import SamplingParams
from tests.tiny_models import tiny_checkpoint, tiny_tokens

LIMITS: Any = {
    "max_model_len": 128,
    "max_batch_tokens": 32,
    "max_sequences": 4,
    "max_logit_rows": 32,
    "dtype": "float32",
}
PROMPTS = [tiny_tokens(33), tiny_tokens(7), tiny_tokens(1), tiny_tokens(18)[::-1]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def alone(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    built = build(checkpoint, tmp_path_factory.mktemp("alone") / "engine.llmc", **LIMITS)
    with load(built.path, threads=1) as engine:
        yield engine


@pytest.fixture(scope="module", params=[2, 3])
def path(request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    return build(checkpoint, folder / "engine.llmc", tensor_parallel_size=request.param, **LIMITS).path


def children() -> set[int]:
    """Processes that this one has started."""
    return {child.pid for child in psutil.Process().children()}


def test_logits_and_greedy_tokens_are_those_of_one_rank(alone: Engine, path: Path) -> None:
    with load(path, threads=1) as engine:
        for prompt in PROMPTS:
            expected, found = alone.logits(prompt), engine.logits(prompt)
            assert float(np.abs(found - expected).max()) <= 1e-4 * float(np.ptp(expected))
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


def test_a_lost_rank_is_named_and_leaves_nothing(path: Path) -> None:
    before = children()
    engine = load(path, threads=1)
    try:
        workers = children() - before
        assert workers
        engine.generate([PROMPTS[1]], SamplingParams(max_tokens=2))
        lost = max(workers)
        os.kill(lost, signal.SIGKILL)
        with pytest.raises(LlmcError, match=rf"rank \d \(process {lost}\) was killed by signal 9"):
            engine.generate([PROMPTS[1]], SamplingParams(max_tokens=100, ignore_eos=True))
    finally:
        engine.close()
    assert children() <= before


def test_a_rank_lost_in_the_middle_of_steps_ends_them(path: Path) -> None:
    before = children()
    with load(path, threads=1) as engine:
        (lost, *_) = sorted(children() - before)
        with pytest.raises(LlmcError, match="the engine cannot go on without it"):
            for count, _ in enumerate(engine.stream(PROMPTS[1], SamplingParams(max_tokens=100, ignore_eos=True))):
                if count == 3:
                    os.kill(lost, signal.SIGKILL)
    assert children() <= before


def test_a_rank_that_cannot_open_is_named(path: Path, tmp_path: Path) -> None:
    engine = tmp_path / "engine.llmc"
    engine.mkdir()
    for file in path.rglob("*"):
        target = engine / file.relative_to(path)
        if file.is_dir():
            target.mkdir(exist_ok=True)
        elif "rank1-" in file.name:
            target.write_bytes(bytes(file.stat().st_size))
        else:
            target.write_bytes(file.read_bytes())
    before = children()
    with pytest.raises(LlmcError, match=r"rank 1 \(process \d+\) could not open the engine"):
        load(engine, threads=1)
    assert children() <= before
