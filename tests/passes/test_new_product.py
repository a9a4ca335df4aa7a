"""A product that nobody knows by name is quantized, sparsified, adapted and counted as any other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from llmc.graph.call_arguments import call_arguments
from llmc.graph.model_graph import Adaptable, ModelGraph
from llmc.graph.op_record import RECORDS
from llmc.graph.product_parts import parts_before
from llmc.options import parse_options
from llmc.passes.adapters.insert_adapters import insert_adapters
from llmc.passes.model_data import ModelData
from llmc.passes.pipeline import default, serving
from llmc.passes.quantization.multiply_unrounded import multiply_unrounded
from llmc.passes.quantization.quantize_weights import quantize_weights
from llmc.passes.runner import run_pipeline
from llmc.passes.sparsity.sparsify import sparsify
from llmc.report.coverage.observer import CoverageObserver
from tests.graph_builder import GraphBuilder, TensorSource

_LIBRARY = torch.library.Library("llmc_tests", "DEF")


def half_linear(
    x: Tensor,
    weight: Tensor,
    dtype: torch.dtype | None = None,
    delta: Tensor | None = None,
    adapters: Tensor | None = None,
) -> Tensor:
    """y = x·weightᵀ / 2."""
    y: Tensor = torch.ops.llmc.linear.default(x, weight, None, dtype, delta, adapters)
    return y / 2


_LIBRARY.define("half_linear" + torch.library.infer_schema(half_linear, mutates_args=()))
_LIBRARY.impl("half_linear", half_linear, "CompositeExplicitAutograd")
OP = torch.ops.llmc_tests.half_linear.default


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Its record is linear's, under its own name."""
    linear = RECORDS[torch.ops.llmc.linear.default]
    monkeypatch.setitem(RECORDS, OP, replace(linear, name="half_linear", overload=OP, reference=half_linear))
    yield


def decoder() -> tuple[ModelGraph, TensorSource]:
    b = GraphBuilder()
    x = b.embedded(32)
    return b.finish(b.call(OP, x, b.weight("layers.0.half.weight", 32, 32)))


def product(graph: ModelGraph) -> Any:
    (node,) = graph.graph.find_nodes(op="call_function", target=OP)
    return node


def test_it_is_quantized_and_counted() -> None:
    graph, source = decoder()
    options = parse_options({"quantize": "w8a8"})
    coverage = CoverageObserver({pass_.name for pass_ in default()}, options)
    passes = (quantize_weights, *serving(), multiply_unrounded)
    result = run_pipeline(graph, passes, options, coverage, ModelData(source)).graph
    parts = {name: part.target for name, part in parts_before(product(result)).items()}
    assert parts == {"weight": torch.ops.llmc.dequantize.default, "x": torch.ops.llmc.round_tokens.default}
    assert {weight.module for weight in result.quantized} == {"layers.0.half", "lm_head"}
    counted = {str(part).partition(";")[0] for part in coverage.coverage()}
    assert "2 of 2 products quantized" in counted and "2 of 2 products with a weight recognised" in counted


def test_it_is_sparsified() -> None:
    graph, source = decoder()
    options = parse_options({"sparsity": "magnitude:0.5"})
    result = run_pipeline(graph, (sparsify,), options, data=ModelData(source)).graph
    assert [weight.module for weight in result.sparse] == ["layers.0.half"]


def test_it_takes_adapters() -> None:
    graph, source = decoder()
    graph.adaptable = (Adaptable("layers.0.half", 32, 32),)
    options = parse_options({"enable_lora": True})
    result = run_pipeline(graph, (*serving(), insert_adapters), options, data=ModelData(source)).graph
    assert call_arguments(product(result))["delta"].target is torch.ops.llmc.lora.default
