"""Gate and up become one product with its activation, from two products or from the halves of one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

from llmc.graph.model_graph import ModelGraph
from llmc.graph.render import render
from llmc.passes.fusion.fuse_gated_linear import fuse_gated_linear
from tests.graph_builder import GraphBuilder, TensorSource, llama
from tests.passes.pass_checks import histogram, refusals, rewritten

aten = torch.ops.aten
Parts = Callable[[GraphBuilder, fx.Node], tuple[fx.Node, fx.Node]]


def test_fuses_two_products(golden: Callable[[str, str], None]) -> None:
    graph, source = llama(layers=1)
    result = rewritten(graph, source, (fuse_gated_linear,))
    golden("passes/fuse_gated_linear.txt", render(result.graph))


def _with_biases(b: GraphBuilder, h: fx.Node) -> tuple[fx.Node, fx.Node]:
    return b.linear(h, "gate", 8, bias=True), b.linear(h, "up", 8, bias=True)


def _halves_by_slices(b: GraphBuilder, h: fx.Node) -> tuple[fx.Node, fx.Node]:
    both = b.linear(h, "both", 16, bias=True)
    return b.call(aten.slice.Tensor, both, 1, 0, 8), b.call(aten.slice.Tensor, both, -1, 8, 9223372036854775807)


def _halves_by_negative_slices(b: GraphBuilder, h: fx.Node) -> tuple[fx.Node, fx.Node]:
    both = b.linear(h, "both", 16)
    return b.call(aten.slice.Tensor, both, 1, None, -8), b.call(aten.slice.Tensor, both, 1, -8)


def _halves_by_split(b: GraphBuilder, h: fx.Node) -> tuple[fx.Node, fx.Node]:
    halves = b.call(aten.split_with_sizes.default, b.linear(h, "both", 16), [8, 8], -1)
    return b.part(halves, 0), b.part(halves, 1)


@pytest.mark.parametrize("parts", [_with_biases, _halves_by_slices, _halves_by_negative_slices, _halves_by_split])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_fuses_products_and_halves(parts: Parts, activation: str) -> None:
    graph, source = _gated(parts, activation)
    result = rewritten(graph, source, (fuse_gated_linear,)).graph
    assert histogram(result) == {
        "llmc.embedding": 1,
        "llmc.gated_linear": 1,
        "llmc.lm_head": 1,
        "llmc.select_rows": 1,
    }


def _of_two_inputs(b: GraphBuilder, h: fx.Node) -> tuple[fx.Node, fx.Node]:
    return b.linear(h, "gate", 8), b.linear(b.call(aten.tanh.default, h), "up", 8)


def _one_bias(b: GraphBuilder, h: fx.Node) -> tuple[fx.Node, fx.Node]:
    return b.linear(h, "gate", 8), b.linear(h, "up", 8, bias=True)


def _no_product(b: GraphBuilder, h: fx.Node) -> tuple[fx.Node, fx.Node]:
    return b.linear(h, "gate", 8), h


def _swapped_halves(b: GraphBuilder, h: fx.Node) -> tuple[fx.Node, fx.Node]:
    gate, up = _halves_by_split(b, h)
    return up, gate


def _every_other(b: GraphBuilder, h: fx.Node) -> tuple[fx.Node, fx.Node]:
    both = b.linear(h, "both", 16)
    return b.call(aten.slice.Tensor, both, 1, 0, 16, 2), b.call(aten.slice.Tensor, both, 1, 1, 16, 2)


def _shared_weight(b: GraphBuilder, h: fx.Node) -> tuple[fx.Node, fx.Node]:
    weight = b.weight("shared", 8, 8)
    product = torch.ops.llmc.linear.default
    return b.call(product, h, weight), b.call(product, h, weight)


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        (
            _of_two_inputs,
            "argument 'x' of llmc.linear.default is tanh_default, expected embedding_default, the same",
        ),
        (_one_bias, "linear_default_1: gate has the bias None, up up_bias"),
        (_no_product, "argument 'up' of llmc.gated_activation.default is llmc.embedding.default, expected a call of"),
        (_swapped_halves, "gate is columns (8, 16) of 16 and up (0, 8), not the two halves in order"),
        (_every_other, "argument 'step' of aten.slice.Tensor is 2, expected 1"),
        (_shared_weight, "shared is also used by linear_default_1"),
    ],
)
def test_refuses(parts: Parts, reason: str) -> None:
    graph, source = _gated(parts, "silu")
    assert reason in refusals(graph, source, (fuse_gated_linear,))


@pytest.mark.parametrize("parts", [_with_biases, _halves_by_split])
def test_refuses_a_product_that_others_read(parts: Parts) -> None:
    b = GraphBuilder()
    gate, up = parts(b, b.embedded())
    inner = b.call(torch.ops.llmc.gated_activation.default, gate, up, "silu")
    graph, source = b.finish(b.call(aten.add.Tensor, inner, gate))
    assert f"{gate.name} is also used by add_tensor" in refusals(graph, source, (fuse_gated_linear,))


def test_refuses_a_whole_that_others_read() -> None:
    b = GraphBuilder()
    gate, up = _halves_by_slices(b, b.embedded())
    inner = b.call(torch.ops.llmc.gated_activation.default, gate, up, "silu")
    whole = gate.all_input_nodes[0]
    graph, source = b.finish(b.call(aten.add.Tensor, inner, b.linear(whole, "down", 8)))
    assert "linear_default is also used by linear_default_1" in refusals(graph, source, (fuse_gated_linear,))


def _gated(parts: Parts, activation: str) -> tuple[ModelGraph, TensorSource]:
    b = GraphBuilder()
    gate, up = parts(b, b.embedded())
    return b.finish(b.call(torch.ops.llmc.gated_activation.default, gate, up, activation))
