"""Policies whose ops score, move and turn rows, in engines for GPUs: tokens are those of the graph's reference."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import llmc
from llmc.codegen.triton.lowering import lower_device
from llmc.engine_format.engine_kinds import ExecutorName
from llmc.frontends.capture import capture
from llmc.options import parse_options
from llmc.passes.model_data import ModelData
from llmc.passes.pipeline import default
from llmc.passes.runner import run_pipeline
from llmc.prediction.device_step import predict_decode
from llmc.program import Program
from llmc.runtime.device.inputs import StepShape, example_step
from llmc.runtime.device.program import plan_calls
from llmc.runtime.engine import Engine
from tests.end_to_end.calibration_queries import write_calibration
from tests.end_to_end.test_scored_compression import BY_KV_HEAD, COMPACTOR, COUNTED, H2O_TEXT, KVZIP, LRU, SNAPKV
from tests.end_to_end.test_streaming import STREAMING
from tests.gpu_target import gpu_target
from tests.runtime.executors.fake_device import STREAM, fake_executor, with_binaries
from tests.tiny_models import tiny_checkpoint, tiny_tokens

TOKENS = tiny_tokens(200)
OF_MEANS = COUNTED, BY_KV_HEAD, f"{COUNTED},heads=all"
# The prompts below are short: 48 tokens are read again.
SHORT = KVZIP.replace("budget=48", "budget=24")
OF_CHUNKS = COMPACTOR.replace("budget=80", "budget=48")
POLICIES = [SNAPKV, H2O_TEXT, SHORT, LRU, OF_CHUNKS, STREAMING, *OF_MEANS]
WITHOUT_QUERIES = STREAMING, *OF_MEANS
each_policy = pytest.mark.parametrize(
    "text", POLICIES, ids=lambda text: "-".join((text.partition(":")[0], *re.findall("heads=.*", text)))
)


def build(folder: Path, text: str, **options: Any) -> Path:
    """An engine for an H100."""
    limits: dict[str, Any] = {"max_batch_tokens": 128, "max_sequences": 4, "max_model_len": 256, "block_size": 8}
    model, path = tiny_checkpoint("llama", folder / "model"), folder / "engine.llmc"
    given = limits | options | calibration(folder, text)
    llmc.build(model, path, target="h100", dtype="float32", kv_compression=text, **given)
    return path


def calibration(folder: Path, text: str) -> dict[str, Any]:
    """The options of a policy that needs a text."""
    return write_calibration(folder) if text in OF_MEANS else {}


def lowered(folder: Path, text: str) -> Program:
    """The program for an H100, not compiled."""
    limits = {"max_batch_tokens": 64, "max_model_len": 256, "block_size": 8, "dtype": "float32"}
    options = parse_options({**limits, "kv_compression": text, **calibration(folder.parent, text)})
    captured = capture(tiny_checkpoint("llama", folder), options)
    graph = run_pipeline(captured.graph, default(), options, data=ModelData(captured.source)).graph
    return lower_device(graph, gpu_target("h100"), options).program


def said(engine: Engine) -> tuple[list[object], list[float]]:
    """Tokens of a request that is cut once and of its neighbour, and their log-probabilities."""
    prompts = [TOKENS[:62], [*TOKENS[:17], 5, 6, 7]]
    answers = engine.generate(prompts, max_tokens=6, logprobs=0, ignore_eos=True)
    assert engine.loop.groups[0].stats.dropped and not engine.loop.groups[0].pool.used
    choices = [answer.choices[0] for answer in answers]
    chosen = [each.logprob for choice in choices for each in choice.logprobs or ()]
    return [choice.token_ids for choice in choices], chosen


@each_policy
def test_steps_have_none_of_the_launches(text: str, tmp_path: Path) -> None:
    """Steps with a compaction run only these launches, other steps none of them. Predictions leave them out."""
    plain, compressed = (lowered(tmp_path / name, policy) for name, policy in (("plain", "none"), ("own", text)))
    steps, cuts = plan_calls(compressed), plan_calls(compressed, compacts=True)
    assert not plan_calls(plain, compacts=True)
    functions = {call.kernel.function for call in cuts}
    assert functions and not functions & {call.kernel.function for call in steps}
    # The queries of each token are written to a cache of their own.
    written = (
        0 if text in WITHOUT_QUERIES else sum(cache.group == 1 and cache.head_dim > 1 for cache in compressed.caches)
    )
    # Their layers rotate in a launch of their own: a decode cannot leave rotated queries to others.
    rotations = len(plain.caches) if written else 0
    target = gpu_target("h100")
    counts = [predict_decode(each, target, requests=2, context=64).launches for each in (plain, compressed)]
    assert counts[1] == counts[0] + written + rotations


def test_a_gpu_runs_the_launches_of_a_compaction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, with the numbers in memory of their own, and a step after it is as before."""
    program = with_binaries(lowered(tmp_path, SNAPKV))
    executor, driver = fake_executor(program, 64, monkeypatch)
    numbers = np.array([24, 16, 3, 24, 0, *range(3), *range(2), 40, 41, 42], np.int32)
    executor.compact(numbers)
    launched = driver.taken()
    cuts = plan_calls(program, compacts=True)
    assert [each.file for each in launched] == [call.kernel.name for call in cuts]
    assert all(each.stream == STREAM and min(each.grid) > 0 for each in launched)
    compaction = executor._mover
    assert compaction.numbers[: len(numbers)].tolist() == numbers.tolist()
    for call, each in zip(cuts, launched, strict=True):
        names = [parameter.name for parameter in call.kernel.parameters]
        (address,) = struct.unpack("<Q", each.values[names.index("compaction_ptr")])
        assert address == compaction.numbers.data_ptr()
    executor.step(example_step(StepShape(9, 1, 1, 32, groups=len(program.policies)), program.limits, 64))
    assert {each.file for each in driver.taken()} <= {call.kernel.name for call in plan_calls(program)}


@pytest.mark.slow
@each_policy
def test_interpreted_kernels_say_what_the_reference_says(text: str, tmp_path: Path) -> None:
    path = build(tmp_path, text)
    with llmc.load(path, executor="reference", prefix_cache=False) as reference:
        tokens, chosen = said(reference)
    with llmc.load(path, executor="triton_interpreter") as engine:
        found, own = said(engine)
    assert found == tokens
    np.testing.assert_allclose(own, chosen, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("text", [SNAPKV, "stride:step=3,recent=16,rows=8"], ids=["snapkv", "stride"])
def test_newest_rows_stay_exact_in_compiled_kernels(text: str, tmp_path: Path) -> None:
    """Prompts come whole and in chunks of 7."""
    path = build(tmp_path, text, kv_cache="int4:head:rotated:recent=13")
    executor: ExecutorName = "ptx"
    with llmc.load(path, executor="reference") as reference:
        tokens, chosen = said(reference)
    for chunk in (None, 7):
        with llmc.load(path, executor=executor, max_step_tokens=chunk) as engine:
            found, own = said(engine)
        assert found == tokens
        np.testing.assert_allclose(own, chosen, atol=1e-3)


@pytest.mark.slow
@each_policy
@pytest.mark.parametrize("cache", [None, "int8"])
def test_compiled_kernels_say_what_the_reference_says(text: str, cache: str | None, tmp_path: Path) -> None:
    path = build(tmp_path, text, **({} if cache is None else {"kv_cache": cache}))
    executor: ExecutorName = "ptx"
    with llmc.load(path, executor="reference") as reference, llmc.load(path, executor=executor) as engine:
        (tokens, chosen), (found, own) = said(reference), said(engine)
    assert found == tokens
    np.testing.assert_allclose(own, chosen, atol=1e-3)
