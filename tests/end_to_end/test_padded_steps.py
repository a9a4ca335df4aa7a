"""Engines whose steps are padded to buckets, as for graphs on a GPU, give the bits of those whose steps are not: their
PTX is executed, and checked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

import llmc
from llmc import SamplingParams
from llmc.engine_format.engine_kinds import ExecutorName
from llmc.program import Program
from llmc.runtime.engine import Engine
from llmc.runtime.executors.ptx import PtxExecutor
from llmc.runtime.speculation import opening
from tests.adapters.directories import llama_adapter
from tests.medusa_heads import medusa_1
from tests.runtime.device.padded_executor import PaddedPtxExecutor, pad_steps
from tests.runtime.speculation.guesses import Open
from tests.tiny_models import tiny_checkpoint, tiny_tokens

pytestmark = pytest.mark.slow
EXECUTED: ExecutorName = "ptx"
LIMITS: Mapping[str, Any] = MappingProxyType(
    {"max_model_len": 96, "max_batch_tokens": 32, "max_sequences": 4, "max_logit_rows": 32}
)
GREEDY = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=4, temperature=1.0, seed=3, ignore_eos=True)
FILTERED = SamplingParams(max_tokens=4, temperature=1.0, top_k=9, seed=4, ignore_eos=True)
PROMPTS = ([*tiny_tokens(20), 5], tiny_tokens(4), [*tiny_tokens(20), 9, 11, 13])
CASES: Mapping[str, tuple[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "float32": ("llama", {"dtype": "float32"}),
        "bfloat16": ("qwen3", {"dtype": "bfloat16"}),
        "windows": ("gemma2", {"dtype": "float32"}),
        "codes": ("llama", {"dtype": "bfloat16", "quantize": "w8a8", "kv_cache": "int8"}),
        "newest_rows": ("llama", {"dtype": "float32", "kv_cache": "int4:head:rotated:recent=9"}),
        "dropped_rows": (
            "llama",
            {"dtype": "float32", "block_size": 8, "kv_compression": "stride:step=2,recent=8,rows=8"},
        ),
    }
)
gpus = pytest.mark.parametrize("target", ["a100", "h100"])


def answers(engine: Engine) -> list[Any]:
    """Of requests together and one by one, whose prompts are divided, and begin alike."""
    found: list[Any] = [engine.logits(PROMPTS[0])]
    for params in (GREEDY, DRAWN, FILTERED):
        found += [completion.choices[0].token_ids for completion in engine.generate(list(PROMPTS), params)]
    return [*found, *(engine.generate([prompt], GREEDY)[0].choices[0].token_ids for prompt in PROMPTS)]


def compare(path: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> PaddedPtxExecutor:
    """Compare the answers. Returns the executor of the padded steps."""
    with llmc.load(path, executor=EXECUTED, **options) as engine:
        wanted = answers(engine)
        executor = engine.loop.executor
        assert isinstance(executor, PtxExecutor) and uses_no_library(executor.program)
    made = pad_steps(monkeypatch)
    with llmc.load(path, executor=EXECUTED, **options) as engine:
        got = answers(engine)
    for ours, theirs in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    return made[0]


def uses_no_library(program: Program) -> bool:
    """Whether the program has no call whose bits may depend on the number of rows."""
    return not any(
        kernel.is_library for kernel in program.kernels if kernel.name in {x.kernel for x in program.launches}
    )


def check_shapes(executor: PaddedPtxExecutor) -> None:
    """There were steps of decodes, and of prompts with and without logits."""
    shapes = [shape for shape in executor.shapes if shape is not None]
    assert any(shape.tokens == shape.requests for shape in shapes)
    prompts = [shape for shape in shapes if shape.tokens > shape.requests]
    assert {0, 1} < {shape.logit_rows for shape in prompts}


@gpus
@pytest.mark.parametrize("case", CASES)
def test_padding_changes_no_bit(case: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family, options = CASES[case]
    model = tiny_checkpoint(family, tmp_path / "model")
    path = llmc.build(model, tmp_path / "e.llmc", target=target, **{**LIMITS, **options}).path
    check_shapes(compare(path, monkeypatch, max_step_tokens=9))


@gpus
@pytest.mark.parametrize("name", ["bard-mixture", "bard-hybrid"])
def test_experts_and_states(name: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Path(__file__).parents[2] / "examples" / "models" / name
    path = llmc.build(model, tmp_path / "e.llmc", target=target, **LIMITS).path
    check_shapes(compare(path, monkeypatch, max_step_tokens=9))


@gpus
def test_adapters(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, adapter = tiny_checkpoint("llama", tmp_path / "model"), llama_adapter(tmp_path / "adapter", scale=0.05)
    pools: Any = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "dtype": "float32"}
    path = llmc.build(model, tmp_path / "e.llmc", target=target, **LIMITS, **pools).path
    found = []
    for is_padded in (False, True):
        if is_padded:
            pad_steps(monkeypatch)
        with llmc.load(path, executor=EXECUTED, max_step_tokens=9) as engine:
            engine.load_adapter("mine", adapter)
            own = [engine.generate(list(PROMPTS), GREEDY, adapter=name) for name in ("mine", None)]
            found.append([completion.choices[0].token_ids for answer in own for completion in answer])
    assert found[0] == found[1]
    assert found[0][:3] != found[0][3:]


@gpus
def test_drafts(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees of drafts, whose tokens share steps with chunks of prompts."""
    monkeypatch.setattr(opening, "Gate", Open)  # What pays depends on time.
    model, heads = tiny_checkpoint("llama", tmp_path / "model"), tmp_path / "heads.safetensors"
    medusa_1(heads, 64)
    options: Any = {"target": target, "dtype": "float32", "speculative": heads, **LIMITS}
    path = llmc.build(model, tmp_path / "e.llmc", **options).path
    executor = compare(path, monkeypatch, speculation={"method": "medusa"}, max_step_tokens=20)
    assert any(shape is not None and 1 < shape.logit_rows < shape.tokens for shape in executor.shapes)
