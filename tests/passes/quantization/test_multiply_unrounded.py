"""Products ask for what codes stand for, not rounded; what reads codes' values otherwise is refused."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from llmc.errors import PassError
from llmc.frontends.checkpoints.memory_source import MemorySource
from llmc.graph.call_arguments import call_arguments
from llmc.graph.execute import run_tokens
from llmc.graph.model_graph import ModelGraph
from llmc.options import BuildOptions
from llmc.passes.quantization.multiply_unrounded import multiply_unrounded
from llmc.passes.runner import PipelineResult, run_pipeline
from tests.codegen.tiny_models import CHANNELS, VOCABULARY, GraphBuilder, aten, ops

BF16 = torch.bfloat16


def coded(b: GraphBuilder, name: str, rows: int) -> fx.Node:
    weight = torch.randn(rows, CHANNELS, generator=torch.Generator().manual_seed(rows))
    scales = ops.weight_scales(weight, "int8", CHANNELS, True, 1, torch.float32)
    codes = ops.weight_codes(weight, scales, None, "int8")
    parts = b.constant(f"{name}_codes", codes), b.constant(f"{name}_scales", scales)
    return b.call(ops.dequantize.default, *parts, None, "int8", b.dtype)


def tied(b: GraphBuilder) -> fx.Node:
    """An embedding, a gate that rounds its tokens, and the head that shares the embedding's codes."""
    table = coded(b, "table", VOCABULARY)
    h = b.call(ops.embedding.default, b.inputs["input_ids"], table)
    rounded = b.call(ops.round_tokens.default, h, None, "int8", b.dtype)
    h = b.call(ops.gated_linear.default, rounded, coded(b, "gates", 2 * CHANNELS), None, "silu")
    return b.call(ops.lm_head.default, b.call(ops.select_rows.default, h, b.inputs["logit_rows"]), table)


def run(graph: ModelGraph, options: BuildOptions | None = None) -> PipelineResult:
    return run_pipeline(graph, (multiply_unrounded,), options or BuildOptions())


def calls(graph: ModelGraph) -> dict[str, list[fx.Node]]:
    by_op: dict[str, list[fx.Node]] = {}
    for node in graph.graph.nodes:
        by_op.setdefault(str(node.target).removeprefix("llmc.").removesuffix(".default"), []).append(node)
    return by_op


def test_parts_are_in_fp32_and_results_as_before() -> None:
    b = GraphBuilder(BF16)
    graph, _ = b.finish(tied(b))
    result = run(graph)
    assert [r.description.split(" + ")[1].split("_default")[0] for r in result.records[0].rewrites] == [
        "embedding",
        "gated_linear",
        "lm_head",
    ]
    by_op = calls(result.graph)
    assert {n.meta["val"].dtype for n in (*by_op["dequantize"], *by_op["round_tokens"])} == {torch.float32}
    assert [n.meta["val"].dtype for name in ("embedding", "gated_linear") for n in by_op[name]] == [BF16, BF16]
    assert len(by_op["dequantize"]) == 2, "the tied weight is decoded by one node still"
    assert not run(result.graph).records[0].rewrites


def test_logits_are_those_of_rounded_values_but_for_the_rounding() -> None:
    b = GraphBuilder(BF16)
    graph, source = b.finish(tied(b))
    rounded, exact = (_logits(model_graph, source) for model_graph in (graph, run(graph).graph))
    assert 0 < float((rounded - exact).norm() / exact.norm()) < 0.02


def test_in_fp32_there_is_nothing_to_do() -> None:
    b = GraphBuilder()
    assert not run(b.finish(tied(b))[0]).records[0].rewrites


def test_what_is_no_product_is_refused_unless_that_is_allowed() -> None:
    b = GraphBuilder(BF16)
    h = b.call(ops.embedding.default, b.inputs["input_ids"], b.weight("table", VOCABULARY, CHANNELS))
    weight = b.call(aten.add.Tensor, coded(b, "head", VOCABULARY), 1.0)
    graph, _ = b.finish(b.call(ops.lm_head.default, h, weight))
    with pytest.raises(PassError, match=r"add_tensor, a aten\.add\.Tensor, reads the dequantized dequantize_default"):
        run(graph)
    result = run(graph, BuildOptions(allow_fallback=("quantized",)))
    assert len(result.records[0].refusals) == 1
    (dequantize,) = calls(result.graph)["dequantize"]
    assert call_arguments(dequantize)["dtype"] is BF16


def _logits(graph: ModelGraph, source: MemorySource) -> torch.Tensor:
    return run_tokens(graph, source, list(range(9))).float()
