"""Quantized engines on CPUs: each scheme and KV cache format computes what the quantized graph computes in torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from llmc.codegen.cpp.backend import CppBackend
from llmc.codegen.cpp.lowering import lower
from llmc.formats.schemes import SCHEMES
from llmc.frontends.capture import capture
from llmc.frontends.captured import Captured
from llmc.graph.execute import Chunk, run_steps
from llmc.graph.model_graph import ModelGraph
from llmc.graph.weights import WeightSource
from llmc.options import parse_options
from llmc.passes.pipeline import canonical
from llmc.passes.runner import run_pipeline
from llmc.program import Layout
from llmc.targets import host_target
from tests.codegen.engine_harness import run_engine
from tests.codegen.tiny_models import GraphBuilder, ops
from tests.passes.quantization.quantizing import TOKENS, calibration_file, captured_llama, odd_llama, optimized
from tests.quantized_checkpoints import tiny_llama
from tests.quick_sample import quick_sample
from tests.tiny_models import saved, tiny_checkpoint

STEPS = (
    (Chunk(0, 0, TOKENS[:20]), Chunk(1, 0, TOKENS[5:8])),
    (Chunk(1, 3, TOKENS[8:20]), Chunk(0, 20, TOKENS[20:21])),
    (Chunk(0, 21, TOKENS[21:22]), Chunk(1, 15, TOKENS[20:21])),
)


def difference(graph: ModelGraph, directory: Path, source: WeightSource | None = None) -> float:
    """The greatest root mean square difference from the graph's logits, over their spread."""
    lowered = lower(graph, host_target(), parse_options({}))
    source = source or captured_llama().source
    got, want = run_engine(lowered, source, STEPS, host_target(), directory), run_steps(graph, source, STEPS)
    pairs = [(a, b) for step in zip(got, want, strict=True) for a, b in zip(*step, strict=True)]
    return max(float((a - b).square().mean().sqrt() / b.std()) for a, b in pairs)


WEIGHT_ONLY = [
    *("int8", "int8:asym", "int6:g32", "int5:g32:asym", "int4:g32", "int4:g32:asym"),
    *("fp8", "fp8:tensor", "nf4:g32", "mxfp4"),
    *("q4_k:xnone", "q5_k:s32:xnone", "q6_k:xnone", "iq4_nl:xnone", "q4_1:xnone"),
]
_QUICK = ("int8", "int6:g32", "int4:g32:asym", "fp8", "mxfp4", "q4_k:xnone")


# cpp/kernels/test_coded_products.py has the kernels of all; here are channels and groups, zeros and tables.
@pytest.mark.parametrize("scheme", quick_sample(WEIGHT_ONLY, _QUICK))
def test_weight_only_schemes_equal_the_graph(scheme: str, tmp_path: Path) -> None:
    assert difference(optimized(scheme).graph, tmp_path) < 1e-5


def test_blocks_equal_the_graph(tmp_path: Path) -> None:
    """In one layer that blocks of 128 columns divide, and whose rows end within a block."""
    sizes: dict[str, Any] = {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    options = parse_options({})
    stored = capture(tiny_checkpoint("llama", tmp_path / "model", num_hidden_layers=1, vocab_size=96, **sizes), options)
    captured = Captured(run_pipeline(stored.graph, canonical(), options).graph, stored.source)
    graph = optimized("fp8:block", captured=captured).graph
    assert len({weight.rows % 128 for weight in graph.quantized}) > 1
    assert difference(graph, tmp_path, stored.source) < 1e-5


@pytest.mark.parametrize("scheme", ["int8-gptq", "w4a8-awq:g32"])
def test_calibrated_schemes_equal_the_graph(scheme: str, tmp_path: Path) -> None:
    graph = optimized(scheme, calibration=calibration_file(tmp_path)).graph
    assert difference(graph, tmp_path) < (1e-5 if scheme == "int8-gptq" else 1e-2)


@pytest.mark.parametrize("scheme", ["w8a8", "w6a8:g32", "w4a8:g32", "fp8-w8a8", "q4_k:x32"])
def test_schemes_that_round_activations_equal_the_graph(scheme: str, tmp_path: Path) -> None:
    """But where a sum in another order moves an activation over the edge between two codes."""
    assert difference(optimized(scheme).graph, tmp_path) < 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
def test_odd_widths_equal_the_graph(scheme: str, tmp_path: Path) -> None:
    """576, 512 and 896 columns: groups of 128 do not divide all of them, and parts of k end within a row."""
    captured, rounds_tokens = odd_llama(), SCHEMES[scheme].activation != "none"
    graph = optimized(scheme, captured=captured, calibration=calibration_file(tmp_path, tokens=512)).graph
    assert difference(graph, tmp_path, captured.source) < (1e-2 if rounds_tokens else 1e-5)


@pytest.mark.parametrize("kv_cache", ["int8", "int4:g8", "fp8", "int8/int4:g8:rotated"])
def test_coded_kv_caches_equal_the_graph(kv_cache: str, tmp_path: Path) -> None:
    assert difference(optimized("none", kv_cache=kv_cache).graph, tmp_path) < 1e-2


def test_a_tied_weight_is_stored_once(tmp_path: Path) -> None:
    model = tiny_llama()
    model.config.tie_word_embeddings = True
    model.tie_weights()
    options = parse_options({})
    stored = capture(saved(model, tmp_path), options)
    captured = Captured(run_pipeline(stored.graph, canonical(), options).graph, stored.source)
    graph = optimized("w4a8:g32,lm_head=w4a8:g32", captured=captured).graph
    program = lower(graph, host_target(), parse_options({})).program
    (head,) = (launch for launch in program.launches if launch.family == "quantized_lm_head")
    (rows,) = (launch for launch in program.launches if launch.family == "quantized_embedding")
    assert head.arguments["weight"] == rows.arguments["weight"]
    assert {slot.layout for slot in program.weights if slot.dtype == "U8"} == {
        Layout.CODE_PANELS,
        Layout.GATED_CODE_PANELS,
    }


def refusal(
    format: str = "int4",
    x_format: str = "none",
    groups: int = 3,
    dtype: torch.dtype = torch.float32,
    scale_dtype: torch.dtype = torch.bfloat16,
) -> str | None:
    """Why the CPU cannot multiply 4 tokens and a weight [64, 96]."""
    b = GraphBuilder(dtype)
    x = b.weight("x", 4, 96)
    codes = b.constant("codes", torch.zeros(64, 96, dtype=torch.int8 if format == "int4" else torch.uint8))
    scales = b.constant("scales", torch.ones(64, groups, dtype=scale_dtype))
    weight = b.call(ops.dequantize.default, codes, scales, None, format, torch.float32)
    if x_format != "none":
        x = b.call(ops.round_tokens.default, x, None, x_format, torch.float32)
    node = b.call(ops.linear.default, x, weight, None, dtype)
    refused = CppBackend(host_target()).refusal(node)
    return None if refused is None else refused.reason


def test_a_dense_weight_takes_no_rounded_tokens() -> None:
    b = GraphBuilder()
    x = b.call(ops.round_tokens.default, b.weight("x", 4, 96), None, "int8", torch.float32)
    refused = CppBackend(host_target()).refusal(b.call(ops.linear.default, x, b.weight("w", 64, 96)))
    assert refused is not None and refused.reason.endswith(
        "multiplies the result of llmc.round_tokens by dense weights"
    )


def test_what_no_kernel_multiplies_is_refused() -> None:
    assert refusal() is None
    assert refusal(format="nf4", x_format="int8") == "kernels do not multiply int8 activations and nf4 weights"
    assert "x is torch.float16" in str(refusal(dtype=torch.float16))
    assert "scales are torch.float64" in str(refusal(scale_dtype=torch.float64))
    assert "groups are of 4 columns" in str(refusal(groups=24))
