"""Engines in pipeline stages: what one process computes, however many steps are under way, and what a lost rank is."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from llmc.compiler import build
from llmc.engine_format import read_engine
from llmc.errors import LlmcError
from llmc.runtime.engine import Engine
from llmc.runtime.kv_capacity import cache_bytes
from llmc.runtime.loading import load
from llmc.runtime.sampling.sampling_params import SamplingParams
from tests.end_to_end.logits import torch_logits
from tests.runtime.ranks.test_between_machines import free_port, other_rank, variables
from tests.tiny_models import tiny_checkpoint, tiny_model, tiny_tokens

LIMITS: Any = {
    "max_model_len": 128,
    "max_batch_tokens": 32,
    "max_sequences": 4,
    "max_logit_rows": 32,
    "dtype": "float32",
}
PROMPTS = [tiny_tokens(33), tiny_tokens(7), tiny_tokens(1), tiny_tokens(18)[::-1]]


@dataclass(frozen=True)
class Case:
    """A model with as many layers as that, built for one process and for several. sizes: tensor ranks and stages."""

    family: str
    sizes: tuple[int, int]
    alone: Path
    path: Path

    @property
    def model(self) -> torch.nn.Module:
        """Of transformers."""
        model: torch.nn.Module = tiny_model(self.family, **layers(self.sizes[1])).train(False)
        return model


def layers(stages: int) -> dict[str, Any]:
    """Of a tiny model that can be cut into so many stages; it has two by itself."""
    return {"num_hidden_layers": stages} if stages > 2 else {}


def cases() -> list[Any]:
    quick = (("qwen3", (2, 2)),)
    more = [(family, sizes) for family in ("llama", "gemma2", "phi3", "gpt2") for sizes in ((1, 2), (2, 2))]
    more.append(("llama", (1, 3)))
    params = [pytest.param(param, id=f"{param[0]}-{param[1]}") for param in quick]
    slow = [param for param in more if param not in quick]
    return params + [pytest.param(param, id=f"{param[0]}-{param[1]}", marks=pytest.mark.slow) for param in slow]


@pytest.fixture(scope="module", params=cases())
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    family, (tensor, pipeline) = request.param
    folder = tmp_path_factory.mktemp("stages")
    checkpoint = tiny_checkpoint(family, folder / "model", **layers(pipeline))
    alone = build(checkpoint, folder / "alone.llmc", **LIMITS).path
    sizes = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}
    path = build(checkpoint, folder / "engine.llmc", **sizes, **LIMITS).path
    return Case(family, (tensor, pipeline), alone, path)


@pytest.fixture(scope="module")
def alone(case: Case) -> Iterator[Engine]:
    with load(case.alone, threads=1) as engine:
        yield engine


@pytest.fixture(scope="module")
def staged(case: Case) -> Iterator[Engine]:
    with load(case.path, threads=1) as engine:
        yield engine


def children() -> set[int]:
    """Processes that this one has started."""
    return {child.pid for child in psutil.Process().children()}


def test_logits_are_those_of_one_process(case: Case, alone: Engine, staged: Engine) -> None:
    """Bit for bit where only layers are cut."""
    for prompt in PROMPTS:
        expected, actual = alone.logits(prompt), staged.logits(prompt)
        assert float(np.abs(actual - expected).max()) <= 1e-4 * float(np.ptp(expected))
        assert case.sizes[0] > 1 or np.array_equal(actual, expected)


def test_greedy_tokens_are_the_models(case: Case, staged: Engine) -> None:
    sampling = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
    for prompt, completion in zip(PROMPTS, staged.generate(PROMPTS, sampling), strict=True):
        written = list(completion.token_ids)
        logits = torch_logits(case.model, prompt + written)[len(prompt) - 1 : -1]
        assert len(written) == 64 and logits.argmax(-1).tolist() == written


def test_forks_and_bits_among_neighbours(staged: Engine) -> None:
    """Blocks are copied in every stage, and a request's tokens do not depend on what runs beside it."""
    sampling = SamplingParams(max_tokens=24, temperature=0.9, seed=5, n=3)
    by_itself = staged.generate([PROMPTS[0]], sampling)[0]
    assert staged.generate(PROMPTS, sampling)[0] == by_itself


def test_prompt_logprobs(case: Case, alone: Engine, staged: Engine) -> None:
    sampling = SamplingParams(max_tokens=3, temperature=0.0, prompt_logprobs=2, logprobs=2)
    expected, actual = (engine.generate([PROMPTS[1]], sampling)[0] for engine in (alone, staged))
    assert actual.token_ids == expected.token_ids
    assert actual.prompt_logprobs and expected.prompt_logprobs
    assert len(actual.prompt_logprobs) == len(expected.prompt_logprobs)
    assert case.sizes[0] > 1 or actual == expected


def test_drafts_in_stages(case: Case, alone: Engine) -> None:
    """Their rows move in every stage where they came true out of order."""
    sampling = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    expected = [completion.token_ids for completion in alone.generate(PROMPTS, sampling)]
    with load(case.path, threads=1, speculation={"method": "lookahead"}) as engine:
        assert [completion.token_ids for completion in engine.generate(PROMPTS, sampling)] == expected


def test_preemption_keeps_the_tokens(case: Case, alone: Engine) -> None:
    """With blocks for two sequences of four, all stages let go of the same ones."""
    sampling = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    expected = [completion.token_ids for completion in alone.generate(PROMPTS, sampling)]
    program = read_engine(case.path).whole_program
    with load(case.path, threads=1, kv_cache_bytes=cache_bytes(11, program)) as engine:
        actual = [completion.token_ids for completion in engine.generate(PROMPTS, sampling)]
        assert engine.loop.scheduler.preemptions > 0
    assert actual == expected


def test_a_lost_rank_is_named_whichever_it_is(case: Case) -> None:
    before = children()
    ranks = case.sizes[0] * case.sizes[1]
    for rank in range(1, ranks):
        engine = load(case.path, threads=1)
        try:
            lost = sorted(children() - before)[rank - 1]
            with pytest.raises(LlmcError, match=rf"rank {rank} \(process {lost}\) was killed by signal 9"):
                for count, _ in enumerate(engine.stream(PROMPTS[1], SamplingParams(max_tokens=100, ignore_eos=True))):
                    if count == 3:
                        os.kill(lost, signal.SIGKILL)
        finally:
            engine.close()
        assert children() <= before


def test_a_stage_that_stands_still_is_named(case: Case, environment: Callable[[str, str], None]) -> None:
    environment("LLMC_RANK_STALL_SECONDS", "1")
    before = children()
    with load(case.path, threads=1) as engine:
        stopped = max(children() - before)
        os.kill(stopped, signal.SIGSTOP)
        with pytest.raises(LlmcError, match=rf"process {stopped}\) has kept the others waiting for"):
            engine.generate([PROMPTS[1]], SamplingParams(max_tokens=4))
    assert children() <= before


def test_a_rank_lost_between_steps_is_named(case: Case) -> None:
    before = children()
    with load(case.path, threads=1) as engine:
        lost = max(children() - before)
        os.kill(lost, signal.SIGKILL)
        with pytest.raises(LlmcError, match=rf"process {lost}\) was killed by signal 9"):
            engine.generate([PROMPTS[1]], SamplingParams(max_tokens=100, ignore_eos=True))


@pytest.mark.slow
def test_between_machines(case: Case, staged: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that share no memory give the same bits, and the others end with the first."""
    sampling = SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True)
    expected = staged.logits(PROMPTS[0]), [completion.token_ids for completion in staged.generate(PROMPTS, sampling)]
    ranks, port = case.sizes[0] * case.sizes[1], free_port()
    with ExitStack() as started:
        others = [
            started.enter_context(other_rank(case.path, variables(rank, ranks, port))) for rank in range(1, ranks)
        ]
        for name, value in variables(0, ranks, port).items():
            monkeypatch.setenv(name, value)
        with load(case.path, threads=1) as engine:
            assert np.array_equal(engine.logits(PROMPTS[0]), expected[0])
            assert [completion.token_ids for completion in engine.generate(PROMPTS, sampling)] == expected[1]
        assert [other.wait() for other in others] == [0] * (ranks - 1)


def test_drafts_that_are_built_in_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LlmcError, match="engines with pipeline stages do not collect"):
        build("model", tmp_path / "engine.llmc", pipeline_parallel_size=2, speculative="heads.safetensors")
