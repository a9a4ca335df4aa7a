"""Whole steps of quantized GPU programs, interpreted: the logits of the quantized graph in torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from llmc.codegen.triton.launch_alternatives import launch_alternatives
from llmc.codegen.triton.lowering import lower_device
from llmc.frontends.captured import Captured
from llmc.graph.execute import Chunk, run_steps
from llmc.graph.model_graph import ModelGraph
from llmc.options import BuildOptions
from tests.codegen.triton.device_harness import interpret_steps
from tests.gpu_target import gpu_target
from tests.passes.quantization.quantizing import TOKENS, captured_llama, odd_llama, optimized

STEPS = (
    (Chunk(0, 0, TOKENS[:6]), Chunk(1, 0, TOKENS[5:8])),
    (Chunk(0, 6, TOKENS[6:7]), Chunk(1, 3, TOKENS[8:9])),
)
OPTIONS = BuildOptions(max_batch_tokens=16, max_sequences=4, max_logit_rows=16, max_model_len=32)
H100 = gpu_target("h100")


def difference(graph: ModelGraph, directory: Path, captured: Captured | None = None) -> float:
    """The greatest difference from the graph's logits, over their spread."""
    source = (captured or captured_llama()).source
    got = interpret_steps(lower_device(graph, H100, OPTIONS), source, STEPS, directory)
    pairs = [
        (a, b) for step in zip(got, run_steps(graph, source, STEPS), strict=True) for a, b in zip(*step, strict=True)
    ]
    return max(float((a - b).abs().max() / b.std()) for a, b in pairs)


@pytest.mark.parametrize(
    "scheme",
    [
        "int8",
        "q4_k:xnone",
        *(pytest.param(f, marks=pytest.mark.slow) for f in ("int4:g32:asym", "int6:g32", "q6_k:xnone")),
    ],
)
def test_weight_only_schemes_equal_the_graph(scheme: str, tmp_path: Path) -> None:
    assert difference(optimized(scheme).graph, tmp_path) < 1e-4


_ROUNDED = ("w8a8:xrow", "w4a8:g32:x32", "q5_k:x32", "fp8-w8a8")


@pytest.mark.parametrize(
    "scheme", ["w8a8:x32", *(pytest.param(rounding, marks=pytest.mark.slow) for rounding in _ROUNDED)]
)
def test_schemes_that_round_activations_equal_the_graph(scheme: str, tmp_path: Path) -> None:
    """But where a sum in another order moves an activation over the edge between two codes."""
    assert difference(optimized(scheme).graph, tmp_path) < 4e-2


@pytest.mark.parametrize(
    ("scheme", "function"),
    [("fp8-w8a8", "fp8_matmul"), pytest.param("w8a8:xrow", "int8_matmul", marks=pytest.mark.slow)],
)
def test_the_library_multiplies_codes(scheme: str, function: str, tmp_path: Path) -> None:
    """In every product of a layer, and in lm_head, in steps of more than 16 tokens."""
    graph, source = optimized(scheme).graph, captured_llama().source
    limits = {"max_batch_tokens": 32, "max_logit_rows": 32}
    lowered = lower_device(graph, H100, OPTIONS.model_copy(update=limits))
    found = {a.first: a for a in lowered.program.alternatives if any(x.family == function for x in a.launches)}
    changed = launch_alternatives(lowered.program, list(found.values()))
    used = [launch for launch in changed.launches if launch.family == function]
    assert len(used) >= 4 * len(graph.caches) + 1
    assert all(launch.only is None or launch.only.first > 16 for launch in used)
    steps = ((Chunk(0, 0, TOKENS[:19]),), (Chunk(0, 19, TOKENS[19:20]), Chunk(1, 0, TOKENS[:17])))
    got = interpret_steps(replace(lowered, programs={"h100": changed}), source, steps, tmp_path)
    for ours, theirs in zip(got, run_steps(graph, source, steps), strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert float((a - b).abs().max() / b.std()) < 4e-2


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "tolerance"), [("q4_k:xnone", 1e-4), ("q6_k:x32", 4e-2), ("w4a8:x32", 4e-2)])
def test_widths_that_super_blocks_of_256_do_not_divide(scheme: str, tolerance: float, tmp_path: Path) -> None:
    """Columns of SmolLM2, 576, and of Qwen2 0.5B, 896."""
    graph = optimized(scheme, captured=odd_llama()).graph
    assert difference(graph, tmp_path, odd_llama()) < tolerance


@pytest.mark.parametrize(
    "kv_cache", ["int8/int4:g8", *(pytest.param(f, marks=pytest.mark.slow) for f in ("int4:g8", "int8", "fp8"))]
)
def test_coded_kv_caches_equal_the_graph(kv_cache: str, tmp_path: Path) -> None:
    assert difference(optimized("none", kv_cache=kv_cache).graph, tmp_path) < 4e-2
