"""The residual stream is added in the product's epilogue, in every order and with a multiplier."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

from llmc.graph.model_graph import ModelGraph
from llmc.graph.render import render
from llmc.passes.fusion.fuse_linear_activation import fuse_linear_activation
from llmc.passes.fusion.fuse_linear_residual import fuse_linear_residual
from tests.graph_builder import GraphBuilder, TensorSource, llama
from tests.passes.pass_checks import histogram, refusals, rewritten

aten = torch.ops.aten
Build = Callable[[GraphBuilder, fx.Node], fx.Node]


def test_adds_the_residual_stream(golden: Callable[[str, str], None]) -> None:
    graph, source = llama(layers=1)
    result = rewritten(graph, source, (fuse_linear_residual,))
    golden("passes/fuse_linear_residual.txt", render(result.graph))


def _product_first(b: GraphBuilder, h: fx.Node) -> fx.Node:
    return b.call(aten.add.Tensor, b.linear(h, "o", 8, bias=True), h)


def _scaled(b: GraphBuilder, h: fx.Node) -> fx.Node:
    return b.call(aten.add.Tensor, h, b.call(aten.mul.Tensor, b.linear(h, "o", 8), 0.22))


def _parallel(b: GraphBuilder, h: fx.Node) -> fx.Node:
    both = b.call(aten.add.Tensor, b.linear(h, "mlp", 8), b.linear(h, "attention", 8))
    return b.call(aten.add.Tensor, both, h)


def _parallel_residual_first(b: GraphBuilder, h: fx.Node) -> fx.Node:
    first = b.call(aten.add.Tensor, h, b.linear(h, "attention", 8))
    return b.call(aten.add.Tensor, first, b.linear(h, "mlp", 8))


def _two_products(b: GraphBuilder, h: fx.Node) -> fx.Node:
    return b.call(aten.add.Tensor, b.linear(h, "left", 8), b.linear(h, "right", 8))


def _three_products(b: GraphBuilder, h: fx.Node) -> fx.Node:
    return b.call(aten.add.Tensor, _two_products(b, h), b.linear(h, "third", 8))


@pytest.mark.parametrize(
    ("build", "fused", "plain"),
    [
        (_product_first, 1, 0),
        (_scaled, 1, 0),
        (_parallel, 2, 0),
        (_parallel_residual_first, 2, 0),
        (_two_products, 1, 1),
        (_three_products, 2, 1),
    ],
)
def test_fuses(build: Build, fused: int, plain: int) -> None:
    graph, source = _built(build)
    seen = histogram(rewritten(graph, source, (fuse_linear_residual,)).graph)
    assert (seen["llmc.fused_linear"], seen.get("llmc.linear", 0)) == (fused, plain)
    assert "aten.add.Tensor" not in seen
    assert "aten.mul.Tensor" not in seen


def test_adds_to_an_activated_product() -> None:
    graph, source = _built(
        lambda b, h: b.call(aten.add.Tensor, h, b.call(aten.silu.default, b.linear(h, "o", 8, bias=True)))
    )
    result = rewritten(graph, source, (*fuse_linear_activation, fuse_linear_residual)).graph
    (node,) = result.graph.find_nodes(op="call_function", target=torch.ops.llmc.fused_linear.default)
    assert node.args[4:] == ("silu", 1.0)
    assert node.args[3] is not None


def test_a_scaled_product_that_has_its_residual_is_not_taken_again() -> None:
    graph, source = _built(lambda b, h: b.call(aten.mul.Tensor, _product_first(b, h), 0.5))
    seen = histogram(rewritten(graph, source, (fuse_linear_residual,)).graph)
    assert (seen["llmc.fused_linear"], seen["aten.mul.Tensor"]) == (1, 1)


def _twice(b: GraphBuilder, h: fx.Node) -> fx.Node:
    product = b.linear(h, "o", 8)
    return b.call(aten.mul.Tensor, b.call(aten.add.Tensor, h, product), product)


def _scaled_twice(b: GraphBuilder, h: fx.Node) -> fx.Node:
    product = b.linear(h, "o", 8)
    scaled = b.call(aten.mul.Tensor, product, 0.5)
    return b.call(aten.mul.Tensor, b.call(aten.add.Tensor, h, scaled), product)


def _inner_twice(b: GraphBuilder, h: fx.Node) -> fx.Node:
    inner = _two_products(b, h)
    return b.call(aten.mul.Tensor, b.call(aten.add.Tensor, inner, h), b.call(aten.tanh.default, inner))


def _vector(b: GraphBuilder, h: fx.Node) -> fx.Node:
    return b.call(aten.add.Tensor, b.linear(h, "o", 8), b.weight("bias", 8))


def _shifted(b: GraphBuilder, h: fx.Node) -> fx.Node:
    return b.call(aten.add.Tensor, b.linear(h, "o", 8), 1.5)


def _doubled(b: GraphBuilder, h: fx.Node) -> fx.Node:
    product = b.linear(h, "o", 8)
    return b.call(aten.add.Tensor, product, product)


def _weighted(b: GraphBuilder, h: fx.Node) -> fx.Node:
    return b.call(aten.add.Tensor, h, b.linear(h, "o", 8), alpha=2)


def test_a_sum_that_is_no_residual_is_no_candidate() -> None:
    graph, source = _built(_doubled)
    assert refusals(graph, source, (fuse_linear_residual,)) == ""


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (_twice, "linear_default: linear_default is also used by mul_tensor"),
        (_scaled_twice, "linear_default: linear_default is also used by mul_tensor_1"),
        (_vector, "the product is float32[T, 8], what it is added to float32[8]"),
        (_shifted, "the product is added to the number 1.5"),
        (_weighted, "argument 'alpha' of aten.add.Tensor is 2, expected 1"),
    ],
)
def test_refuses(build: Build, reason: str) -> None:
    graph, source = _built(build)
    assert reason in refusals(graph, source, (fuse_linear_residual,))


def test_refuses_to_reorder_a_sum_that_others_read() -> None:
    graph, source = _built(_inner_twice)
    result = rewritten(graph, source, (fuse_linear_residual,))
    assert histogram(result.graph)["llmc.fused_linear"] == 1
    assert "is also used by" in result.records[0].refusals[0].reason


def _built(build: Build) -> tuple[ModelGraph, TensorSource]:
    b = GraphBuilder()
    return b.finish(build(b, b.embedded()))
