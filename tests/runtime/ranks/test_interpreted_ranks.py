"""Engines for GPUs on several ranks, interpreted: processes that meet in memory and over gloo, as GPUs do over NVLink
and NCCL."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from llmc.compiler import build
from llmc.engine_format import read_engine
from llmc.engine_format.engine_kinds import ExecutorName
from llmc.errors import RankError, UnavailableError
from llmc.runtime.async_engine import AsyncEngine
from llmc.runtime.loading import load
from llmc.runtime.sampling.sampling_params import SamplingParams
from tests.runtime.async_clients import listen, request
from tests.tiny_models import tiny_checkpoint, tiny_tokens

LIMITS: Any = {
    "max_model_len": 256,
    "max_batch_tokens": 160,
    "max_sequences": 2,
    "max_logit_rows": 2,
    "dtype": "float32",
}
# Kernels of two processes that wait for each other are interpreted on what cores there are.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    checkpoint = tiny_checkpoint("qwen3", folder / "model")
    return build(checkpoint, folder / "engine.llmc", target="h100", tensor_parallel_size=2, **LIMITS).path


executors = pytest.mark.parametrize("executor", ["triton_interpreter", "ptx"])


@executors
@pytest.mark.parametrize("length", [5, 140])
def test_kernels_of_two_processes_compute_the_graph(length: int, executor: ExecutorName, path: Path) -> None:
    """Few rows out of each other's memory; 140, which are more than an H100 has processors, by the library."""
    prompt, greedy = tiny_tokens(length), SamplingParams(max_tokens=2, temperature=0.0, logprobs=1)
    with load(path, executor="reference") as reference, load(path, executor=executor) as engine:
        (expected,), (actual,) = (opened.generate([prompt], greedy) for opened in (reference, engine))
    assert actual.token_ids == expected.token_ids
    theirs, ours = (
        [token.logprob for token in completion.choices[0].logprobs or ()] for completion in (expected, actual)
    )
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)


@executors
def test_ranks_norm_a_share_of_many_rows_each(executor: ExecutorName, tmp_path: Path) -> None:
    """46 of 140 on each of three, and two on all; the residual stream stays in parts up to its end."""
    checkpoint = tiny_checkpoint("qwen3", tmp_path / "model", num_hidden_layers=4)
    limits = {**LIMITS, "max_batch_tokens": 32768}
    engine = build(checkpoint, tmp_path / "engine.llmc", target="h100", tensor_parallel_size=3, **limits).path
    launches = read_engine(engine).program.launches
    assert sum(launch.family == "sum_shares_kernel" for launch in launches) >= 6
    prompt, greedy = tiny_tokens(140), SamplingParams(max_tokens=2, temperature=0.0, logprobs=1)
    with load(engine, executor="reference") as reference, load(engine, executor=executor) as ranks:
        (expected,), (actual,) = (opened.generate([prompt], greedy) for opened in (reference, ranks))
    assert actual.token_ids == expected.token_ids
    theirs, ours = (
        [token.logprob for token in completion.choices[0].logprobs or ()] for completion in (expected, actual)
    )
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)


def test_an_engine_of_eight_ranks_is_built_without_a_gpu(tmp_path: Path) -> None:
    """All of its kernels are machine code, and each rank has weights of its own."""
    sizes: Any = {"num_attention_heads": 8, "num_key_value_heads": 8, "hidden_size": 128, "num_hidden_layers": 1}
    checkpoint = tiny_checkpoint("llama", tmp_path / "model", intermediate_size=128, **sizes)
    # Steps of two tokens need few kernels.
    limits: Any = {**LIMITS, "dtype": "bfloat16", "max_batch_tokens": 2, "max_model_len": 32}
    engine = build(checkpoint, tmp_path / "engine.llmc", target="h100", tensor_parallel_size=8, **limits).path
    directory = read_engine(engine, check_machine=False)
    kernels = directory.program.launched_kernels()
    assert {"reduce_rows_kernel", "sum_shares_kernel", "gather_channels_kernel"} <= {
        launched.function for launched in kernels
    }
    for kernel in kernels:
        assert (engine / kernel.binaries["sm_90"].file).read_bytes().startswith(b"\x7fELF")
    assert directory.program.ranks == 8
    assert len({file.name.partition("-")[0] for file in (engine / "weights").iterdir()}) == 8


def test_a_lost_rank_is_named(path: Path) -> None:
    """Also where the first one waits for it in a kernel."""
    before = {child.pid for child in psutil.Process().children()}
    with load(path, executor="triton_interpreter") as engine:
        (lost,) = {child.pid for child in psutil.Process().children()} - before
        os.kill(lost, signal.SIGKILL)
        with pytest.raises(RankError, match=rf"rank 1 \(process {lost}\) was killed by signal 9"):
            engine.generate([tiny_tokens(5)], SamplingParams(max_tokens=2))


def test_lost_ranks_are_started_again(path: Path) -> None:
    """Killed while a request runs, and between requests. Later requests have the tokens of those before."""
    prompt, greedy = tuple(tiny_tokens(5)), SamplingParams(max_tokens=2, temperature=0.0)
    before = {child.pid for child in psutil.Process().children()}

    def kill() -> int:
        found: int
        (found,) = {child.pid for child in psutil.Process().children()} - before
        os.kill(found, signal.SIGKILL)
        return found

    async def ask_and_kill() -> None:
        async with AsyncEngine(load(path, executor="ptx")) as engine:
            expected = (await listen(engine, request("first", prompt, greedy))).tokens()
            outputs = engine.generate(request("lost", prompt, SamplingParams(max_tokens=200, ignore_eos=True)))
            await anext(outputs)
            lost = kill()
            with pytest.raises(UnavailableError, match=rf"rank 1 \(process {lost}\) was killed by signal 9"):
                async for _ in outputs:
                    pass
            assert (await listen(engine, request("second", prompt, greedy))).tokens() == expected
            assert engine.stats().rank_restarts == {1: 1}
            kill()
            while engine.stats().rank_restarts != {1: 2}:
                await asyncio.sleep(0.05)
            assert (await listen(engine, request("third", prompt, greedy))).tokens() == expected

    asyncio.run(ask_and_kill())
    assert {child.pid for child in psutil.Process().children()} <= before


@pytest.mark.parametrize("executor", ["triton_interpreter", "reference", None])
def test_torchrun_starts_none(path: Path, executor: ExecutorName | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process starts the ranks of a machine's GPUs by itself."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RankError, match=r"an engine for h100 that .* runs has its ranks on one machine"):
        load(path, executor=executor)
