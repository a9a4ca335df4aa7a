"""Engines for GPUs in pipeline stages, without GPUs: processes that execute PTX or interpret kernels."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from llmc.compiler import build
from llmc.engine_format import read_engine
from llmc.engine_format.engine_kinds import ExecutorName
from llmc.engine_format.manifest import content_digest
from llmc.engine_format.reader import of_rank
from llmc.errors import EngineFormatError, LlmcError, OptionError, PassError, RankError, UnavailableError
from llmc.runtime.async_engine import AsyncEngine
from llmc.runtime.device.binaries import binaries_for
from llmc.runtime.device.device import Device
from llmc.runtime.loading import load
from llmc.runtime.sampling.sampling_params import SamplingParams
from llmc.tuning.tune import tune
from tests.cli.command import llmc as command
from tests.listed_files import file_record
from tests.runtime.async_clients import listen, request
from tests.runtime.tiny_engine import copied
from tests.tiny_models import tiny_checkpoint, tiny_tokens

LIMITS: Any = {
    "max_model_len": 128,
    "max_batch_tokens": 32,
    "max_sequences": 4,
    "max_logit_rows": 16,
    "dtype": "float32",
}
PROMPTS = [tiny_tokens(33), tiny_tokens(7), tiny_tokens(1)]
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
# Chosen by the last stage in each of its ways, and by the first rank from logits.
SAMPLING = [
    GREEDY,
    SamplingParams(max_tokens=5, temperature=0.9, seed=5, ignore_eos=True),
    SamplingParams(max_tokens=5, temperature=0.9, seed=5, top_k=7, ignore_eos=True),
    SamplingParams(max_tokens=4, temperature=0.9, seed=5, top_p=0.99, ignore_eos=True),
    SamplingParams(max_tokens=4, temperature=0.9, seed=5, logprobs=2, ignore_eos=True),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("qwen3", tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(model, tmp_path_factory.mktemp("one") / "engine.llmc", target="a100,h100", **LIMITS).path


@pytest.fixture(scope="module")
def staged(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("two") / "engine.llmc"
    return build(model, path, target="a100,h100", pipeline_parallel_size=2, **LIMITS).path


def children() -> set[int]:
    """Processes that this one has started."""
    return {child.pid for child in psutil.Process().children()}


@pytest.mark.slow
def test_each_stage_is_built_for_each_target_without_a_gpu(staged: Path) -> None:
    directory = read_engine(staged, check_machine=False)
    assert [stage.program.hands_over for stage in directory.stages] == [64, 0]
    for number, stage in enumerate(directory.stages):
        folder = f"stages/{number}/" if number else ""
        assert [made.file for made in stage.programs] == [f"{folder}program.json", f"{folder}programs/h100.json"]
        for made, arch in zip(stage.programs, ("sm_80", "sm_90"), strict=True):
            for kernel in made.program.launched_kernels():
                assert kernel.source.startswith(f"{folder}kernels/")
                assert (staged / kernel.binaries[arch].file).read_bytes().startswith(b"\x7fELF")
    assert {file.name.partition("-")[0] for file in (staged / "weights").iterdir()} == {"rank0", "rank1"}


@pytest.mark.slow
def test_a_stage_is_compiled_for_another_gpu_from_its_sources(
    staged: Path, tmp_path: Path, environment: Callable[[str, str], None]
) -> None:
    environment("LLMC_CACHE_DIR", str(tmp_path))
    told: list[str] = []
    later = Device(0, "NVIDIA B200", (10, 0), 227 * 1024)
    made = binaries_for(of_rank(read_engine(staged, check_machine=False), 1), later, told.append)
    assert len(told) == 1 and made.program.stage == 1
    for kernel in made.program.launched_kernels():
        assert (made.directory / kernel.binaries["sm_100"].file).read_bytes().startswith(b"\x7fELF")


@pytest.mark.slow
@pytest.mark.parametrize("file", ["programs/h100.json", "stages/1/programs/h100.json"])
def test_every_target_s_program_of_a_stage_is_checked(file: str, staged: Path, tmp_path: Path) -> None:
    path = copied(staged, tmp_path / "e.llmc")
    program = json.loads((path / file).read_text(encoding="utf-8"))
    program["hidden_width"] = 32
    text = json.dumps(program).encode()
    (path / file).write_bytes(text)
    manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
    manifest["files"][file] = asdict(file_record(text))
    del manifest["manifest_sha256"]
    manifest["manifest_sha256"] = content_digest(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    with pytest.raises(EngineFormatError, match=r"this is stage [01] of .*, which takes 32 and hands over") as error:
        read_engine(path, check_machine=False)
    assert error.value.at == str(path / file)


@pytest.mark.slow
def test_drafts_and_forks_in_stages(alone: Path, staged: Path) -> None:
    """Blocks are copied and rows are moved in every stage."""
    forked = SamplingParams(max_tokens=6, temperature=0.9, seed=5, n=3, ignore_eos=True)
    found = []
    for path in (alone, staged):
        with load(path, executor="ptx", speculation=DRAFTS) as engine:
            completions = engine.generate(PROMPTS[:2], forked) + engine.generate(PROMPTS[:2], GREEDY)
            found.append([choice.token_ids for done in completions for choice in done.choices])
    assert found[0] == found[1]


@pytest.mark.slow
def test_stages_have_the_bits_of_one_process(alone: Path, staged: Path) -> None:
    """Logits, and the tokens of every way of choosing them."""
    found = []
    for path in (alone, staged):
        with load(path, executor="ptx") as engine:
            tokens = [[done.token_ids for done in engine.generate(PROMPTS, params)] for params in SAMPLING]
            found.append((engine.logits(PROMPTS[0]), tokens))
    assert np.array_equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["ptx", "triton_interpreter"])
def test_stages_of_several_ranks(executor: ExecutorName, model: Path, alone: Path, tmp_path: Path) -> None:
    """Each stage's ranks add up among themselves."""
    sizes: Any = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    path = build(model, tmp_path / "engine.llmc", target="h100", **sizes, **LIMITS).path
    prompts, greedy = PROMPTS[1:2], SamplingParams(max_tokens=2, temperature=0.0, logprobs=1)
    with load(alone, executor="reference") as reference, load(path, executor=executor) as engine:
        (expected,), (actual,) = (opened.generate(prompts, greedy) for opened in (reference, engine))
    assert actual.token_ids == expected.token_ids
    theirs, ours = ([token.logprob for token in done.choices[0].logprobs or ()] for done in (expected, actual))
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_a_lost_stage_is_named_and_started_again(staged: Path) -> None:
    """Killed while a request runs. Later requests have the tokens of those before."""
    before, prompt = children(), tuple(PROMPTS[1])

    async def ask_and_kill() -> None:
        async with AsyncEngine(load(staged, executor="ptx")) as engine:
            expected = (await listen(engine, request("first", prompt, GREEDY))).tokens()
            outputs = engine.generate(request("lost", prompt, SamplingParams(max_tokens=100, ignore_eos=True)))
            await anext(outputs)
            (lost,) = children() - before
            os.kill(lost, signal.SIGKILL)
            with pytest.raises(UnavailableError, match=rf"rank 1 \(process {lost}\) was killed by signal 9"):
                async for _ in outputs:
                    pass
            assert (await listen(engine, request("second", prompt, GREEDY))).tokens() == expected
            assert engine.stats().rank_restarts == {1: 1}

    asyncio.run(ask_and_kill())
    assert children() <= before


@pytest.mark.slow
def test_a_stage_that_stands_still_is_named(staged: Path, environment: Callable[[str, str], None]) -> None:
    environment("LLMC_RANK_STALL_SECONDS", "1")
    before = children()
    with load(staged, executor="ptx") as engine:
        (stopped,) = children() - before
        os.kill(stopped, signal.SIGSTOP)
        with pytest.raises(RankError, match=rf"process {stopped}\) has kept the others waiting for"):
            engine.generate(PROMPTS[1:2], GREEDY)
    assert children() <= before


@pytest.mark.slow
def test_predictions_and_reports_cover_all_stages(alone: Path, staged: Path) -> None:
    """A decode takes longer by what the stages repeat and by the transfer of rows between them."""
    one, two = (load(path).predict(requests=2, context=64) for path in (alone, staged))
    assert two.kernel_launches["hand_over"] == 1
    assert two.seconds > one.seconds + two.kernel_seconds["hand_over"] / 2
    assert {name.rpartition(".")[2] for name in two.kernel_seconds} == {"stage0", "stage1", "hand_over"}
    shown = command("inspect", str(staged), "--launches").out
    assert "hand_over" in shown and "768 B per token" in shown
    told = command("explain", str(staged)).out
    assert "on 2 ranks in 2 stages" in told and "hands over 256 bytes per token" in told


@pytest.mark.slow
def test_what_stages_do_not_support_is_an_error(model: Path, staged: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineFormatError, match="the engine has 2 pipeline stages, and tuning measures whole steps"):
        tune(staged, tmp_path / "tuned.llmc", lambda line: None)
    with pytest.raises(OptionError, match="run by cuda or triton_interpreter or ptx, not by 'reference'"):
        load(staged, executor="reference")
    with pytest.raises(PassError, match="cannot be cut into 3 stages: 2 of its layers attend"):
        build(model, tmp_path / "engine.llmc", target="h100", pipeline_parallel_size=3, **LIMITS)


def test_draft_layers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LlmcError, match="engines with pipeline stages do not collect"):
        build("model", tmp_path / "e.llmc", target="h100", pipeline_parallel_size=2, speculative="heads.safetensors")
