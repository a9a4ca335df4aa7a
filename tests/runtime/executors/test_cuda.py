"""A GPU engine's steps: padding to buckets changes no real row; on a device, graphs give what launches give."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import llmc
from llmc.compiler import build
from llmc.engine_format import EngineDirectory, read_engine
from llmc.runtime.device.binaries import binaries_for
from llmc.runtime.device.device import Device
from llmc.runtime.device.inputs import StepShape
from llmc.runtime.engine import Engine
from llmc.runtime.executors.triton_interpreter import interpret_rank
from llmc.settings import settings
from tests.runtime.device.decode_step import decodes
from tests.runtime.device.padded_step import padded

MODEL = Path(__file__).parent.parent.parent.parent / "examples/models/bard-draft"
PROMPTS = [[5, 9, 11], [17] * 40, [3], [400, 2, 8, 8, 9]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> EngineDirectory:
    path = tmp_path_factory.mktemp("engines") / "bard.llmc"
    build(MODEL, path, target="a100", dtype="float32", max_model_len=64, max_batch_tokens=64, max_sequences=8)
    return read_engine(path)


@pytest.mark.slow
def test_padding_changes_no_real_row(directory: EngineDirectory) -> None:
    size, blocks = directory.program.limits.block_size, 12
    step = decodes([1, 3], size)
    step.block_tables[:] = [[4], [9]]
    step.slot_mapping[:] = [4 * size, 9 * size + 2]
    alone = interpret_rank(directory, blocks + 1).step(step).copy()
    full = padded(step, StepShape(4, 4, 4, 8), size, (blocks,))
    together = interpret_rank(directory, blocks + 1).step(full)
    assert np.isfinite(together).all()
    np.testing.assert_allclose(together[:2], alone, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_kernels_are_compiled_once_for_a_device_that_none_fits(
    directory: EngineDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMC_CACHE_DIR", str(tmp_path))
    settings.cache_clear()
    told: list[str] = []
    h100 = Device(0, "NVIDIA H100", (9, 0), 227 * 1024)
    first = binaries_for(directory, h100, told.append)
    assert len(told) == 1
    assert first.arch == "sm_90"
    for kernel in first.program.launched_kernels():
        assert (first.directory / kernel.binaries["sm_90"].file).read_bytes().startswith(b"\x7fELF")
    assert binaries_for(directory, h100, told.append) == first
    assert len(told) == 1
    settings.cache_clear()


@pytest.fixture(scope="module")
def cpu() -> Iterator[Engine]:
    with llmc.compile(str(MODEL), target="cpu", dtype="float32", max_model_len=128) as engine:
        yield engine


@pytest.fixture(scope="module")
def gpu() -> Iterator[Engine]:
    with llmc.compile(str(MODEL), target="auto", dtype="float32", max_model_len=128) as engine:
        yield engine


@pytest.mark.gpu
def test_logits_are_those_of_the_cpu_engine(cpu: Engine, gpu: Engine) -> None:
    for ours, theirs in zip(gpu.logits(PROMPTS), cpu.logits(PROMPTS), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-2)


@pytest.mark.gpu
def test_exact_newest_rows_are_those_of_the_cpu_engine() -> None:
    """With codes of old rows, of which some leave."""
    prompt, found = [*PROMPTS[0], *range(40, 140)], []
    for target in ("cpu", "auto"):
        options: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "kv_cache": "int8:rotated:recent=20"}
        options["kv_compression"] = "stride:step=2,recent=32,rows=16"
        with llmc.compile(str(MODEL), target=target, **options) as engine:
            found.append(engine.logits(prompt))
            assert engine.loop.groups[0].stats.dropped
            greedy = llmc.SamplingParams(max_tokens=60, ignore_eos=True)
            (alone,) = engine.generate([prompt], greedy)
            assert engine.generate([prompt, *PROMPTS], greedy)[0].token_ids == alone.token_ids
    np.testing.assert_allclose(found[1], found[0], rtol=0, atol=5e-2)


@pytest.mark.gpu
def test_greedy_tokens_are_the_same_from_graphs_launches_and_the_host(gpu: Engine) -> None:
    """With min_tokens the host samples, from logits of the same steps."""
    greedy = llmc.SamplingParams(max_tokens=24, ignore_eos=True)
    on_host = llmc.SamplingParams(max_tokens=24, ignore_eos=True, min_tokens=1)
    together = [completion.token_ids for completion in gpu.generate(PROMPTS, greedy)]
    again = [completion.token_ids for completion in gpu.generate(PROMPTS, greedy)]
    sampled = [completion.token_ids for completion in gpu.generate(PROMPTS, on_host)]
    assert together == again == sampled


@pytest.mark.gpu
@pytest.mark.parametrize(
    "params",
    [
        llmc.SamplingParams(max_tokens=90, ignore_eos=True),
        llmc.SamplingParams(max_tokens=90, temperature=1.0, seed=3, ignore_eos=True),
        llmc.SamplingParams(max_tokens=60, temperature=1.5, top_p=0.99, seed=4, ignore_eos=True),
    ],
    ids=["greedy", "drawn", "filtered"],
)
def test_steps_that_are_queued_ahead_give_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, params: llmc.SamplingParams
) -> None:
    """In the filtered case the host draws, because many tokens remain; it does so after the next step is queued."""
    path, answers = tmp_path / "bard.llmc", []
    build(MODEL, path, target="auto", dtype="float32", max_model_len=160)
    for value in ("0", "1"):
        monkeypatch.setenv("LLMC_RUN_AHEAD", value)
        settings.cache_clear()
        with llmc.load(path) as engine:
            assert (engine.loop._ahead is not None) == (value == "1")
            answers.append([completion.token_ids for completion in engine.generate(PROMPTS, params)])
            answers.append([completion.token_ids for completion in engine.generate(PROMPTS[:1], params)])
    settings.cache_clear()
    assert answers[:2] == answers[2:]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_graphs_of_prompts_give_the_bits_of_launches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: Any
) -> None:
    """Steps are launched, then captured, then replayed; without buckets, the library may choose other kernels."""
    path, found = tmp_path / "bard.llmc", []
    build(MODEL, path, target="auto", dtype=dtype, max_model_len=160)
    prompts = [*PROMPTS, [400, *range(20, 90)]]
    greedy = llmc.SamplingParams(max_tokens=12, ignore_eos=True)
    for value in ("0", "1"):
        monkeypatch.setenv("LLMC_PROMPT_GRAPHS", value)
        settings.cache_clear()
        with llmc.load(path, prefix_cache=False, max_step_tokens=48) as engine:
            rounds = [(engine.logits(prompts), engine.generate(prompts, greedy)) for _ in range(3)]
            executor: Any = engine.loop.executor
            graphs = [kind.shape for kind in executor._graphs._graphs]
            engine.warm_up()
            rounds.append((engine.logits(prompts), engine.generate(prompts, greedy)))
        assert any(shape.tokens > shape.requests for shape in graphs) == (value == "1")
        for logits, completions in rounds[1:]:
            for own, first in zip(logits, rounds[0][0], strict=True):
                np.testing.assert_array_equal(own, first)
            assert [c.token_ids for c in completions] == [c.token_ids for c in rounds[0][1]]
        found.append(rounds[0][0])
    settings.cache_clear()
    for own, launched in zip(found[1], found[0], strict=True):
        np.testing.assert_allclose(own, launched, rtol=0, atol=2e-2 if dtype == "float32" else 0.5)


@pytest.mark.gpu
@pytest.mark.parametrize("prompt", PROMPTS)
def test_forks_and_beams_go_on_from_copied_blocks(gpu: Engine, prompt: list[int]) -> None:
    (alone,) = gpu.generate([prompt], llmc.SamplingParams(max_tokens=12))
    (forked,) = gpu.generate([prompt], llmc.SamplingParams(max_tokens=12, n=4))
    assert [choice.token_ids for choice in forked.choices] == [alone.token_ids] * 4
    (beams,) = gpu.generate([prompt], llmc.SamplingParams(max_tokens=12, n=4, beam_width=4, logprobs=0))
    for choice in beams.choices:
        logits = gpu.logits([*prompt, *choice.token_ids])[len(prompt) - 1 : -1].astype(np.float64)
        shifted = logits - logits.max(-1, keepdims=True)
        rows = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
        total = rows[np.arange(12), list(choice.token_ids)].sum()
        assert choice.cumulative_logprob == pytest.approx(total, abs=0.05)


@pytest.mark.gpu
def test_a_request_does_not_depend_on_its_neighbours(gpu: Engine) -> None:
    params = llmc.SamplingParams(max_tokens=16, ignore_eos=True)
    together = [completion.token_ids for completion in gpu.generate(PROMPTS, params)]
    alone = [gpu.generate([prompt], params)[0].token_ids for prompt in PROMPTS]
    assert together == alone


@pytest.mark.gpu
def test_an_engine_without_fitting_binaries_compiles_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], gpu: Engine
) -> None:
    monkeypatch.setenv("LLMC_CACHE_DIR", str(tmp_path / "cache"))
    settings.cache_clear()
    path = tmp_path / "other.llmc"
    build(MODEL, path, target="b200", dtype="float32", max_model_len=128)
    expected = gpu.logits([5, 9, 11])
    for lines in (1, 0):
        with llmc.load(path) as engine:
            np.testing.assert_allclose(engine.logits([5, 9, 11]), expected, rtol=0, atol=2e-2)
        assert capsys.readouterr().err.count("compiling its") == lines
    settings.cache_clear()
