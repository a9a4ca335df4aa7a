"""Each activation after a product is fused: torch's op, and the forms of several ops that HF writes out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

from llmc.graph.model_graph import ModelGraph
from llmc.graph.render import render
from llmc.passes.fusion.fuse_linear_activation import fuse_linear_activation
from tests.graph_builder import GraphBuilder, TensorSource
from tests.passes.pass_checks import refusals, rewritten

aten = torch.ops.aten
Act = Callable[[GraphBuilder, fx.Node], fx.Node]


def _fast_gelu(b: GraphBuilder, y: fx.Node) -> fx.Node:
    square = b.call(aten.mul.Tensor, b.call(aten.mul.Tensor, y, 0.044715), y)
    scaled = b.call(aten.mul.Tensor, b.call(aten.mul.Tensor, y, 0.7978845608), b.call(aten.add.Tensor, square, 1.0))
    tanh = b.call(aten.add.Tensor, b.call(aten.tanh.default, scaled), 1.0)
    return b.call(aten.mul.Tensor, b.call(aten.mul.Tensor, y, 0.5), tanh)


def _quick_gelu(b: GraphBuilder, y: fx.Node) -> fx.Node:
    return b.call(aten.mul.Tensor, y, b.call(aten.sigmoid.default, b.call(aten.mul.Tensor, y, 1.702)))


def _relu_squared(b: GraphBuilder, y: fx.Node) -> fx.Node:
    return b.call(aten.pow.Tensor_Scalar, b.call(aten.relu.default, y), 2)


def _relu_times_itself(b: GraphBuilder, y: fx.Node) -> fx.Node:
    relu = b.call(aten.relu.default, y)
    return b.call(aten.mul.Tensor, relu, relu)


def _quick_gelu_gated(b: GraphBuilder, y: fx.Node) -> fx.Node:
    return b.call(torch.ops.llmc.gated_activation.default, b.call(aten.mul.Tensor, y, 1.702), y, "sigmoid")


def _relu_gated_by_relu(b: GraphBuilder, y: fx.Node) -> fx.Node:
    return b.call(torch.ops.llmc.gated_activation.default, y, b.call(aten.relu.default, y), "relu")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("act", "name"),
    [
        (lambda b, y: b.call(aten.gelu.default, y), "gelu"),
        (lambda b, y: b.call(aten.relu.default, y), "relu"),
        (lambda b, y: b.call(aten.silu.default, y), "silu"),
        (lambda b, y: b.call(aten.sigmoid.default, y), "sigmoid"),
        (lambda b, y: b.call(aten.tanh.default, y), "tanh"),
        (lambda b, y: b.call(aten.gelu.default, y, approximate="tanh"), "gelu_tanh"),
        (_fast_gelu, "gelu_tanh"),
        (_quick_gelu, "quick_gelu"),
        (_relu_squared, "relu2"),
        (_relu_times_itself, "relu2"),
        (_quick_gelu_gated, "quick_gelu"),
        (_relu_gated_by_relu, "relu2"),
    ],
)
def test_fuses(act: Act, name: str, bias: bool) -> None:
    graph, source = _mlp(act, bias)
    result = rewritten(graph, source, fuse_linear_activation).graph
    (node,) = result.graph.find_nodes(op="call_function", target=torch.ops.llmc.fused_linear.default)
    assert node.args[3:] == (None, name, 1.0)


def test_fuses_a_plain_mlp(golden: Callable[[str, str], None]) -> None:
    b = GraphBuilder()
    y = b.linear(b.embedded(), "fc", 12, bias=True)
    act = b.call(aten.gelu.default, y, approximate="tanh")
    graph, source = b.finish(b.linear(act, "proj", 8))
    result = rewritten(graph, source, fuse_linear_activation)
    golden("passes/fuse_linear_activation.txt", render(result.graph))


def test_refuses_a_product_that_others_read() -> None:
    b = GraphBuilder()
    y = b.linear(b.embedded(), "fc", 8)
    graph, source = b.finish(b.call(aten.add.Tensor, b.call(aten.gelu.default, y), y))
    assert "linear_default is also used by add_tensor (aten.add.Tensor)" in refusals(
        graph, source, fuse_linear_activation
    )


def _mlp(act: Act, bias: bool) -> tuple[ModelGraph, TensorSource]:
    b = GraphBuilder()
    return b.finish(b.linear(act(b, b.linear(b.embedded(), "fc", 12, bias=bias)), "proj", 8))
