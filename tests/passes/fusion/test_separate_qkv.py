"""Q, K and V of each head come to lie in one piece each, unless the product or its weight is needed as it was."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

from llmc.graph.model_graph import ModelGraph
from llmc.graph.render import render
from llmc.passes.fusion.separate_qkv import separate_qkv
from tests.graph_builder import GraphBuilder, TensorSource
from tests.passes.pass_checks import refusals, rewritten

aten = torch.ops.aten
HEADS, WIDTH = 2, 4


def interleaved(
    take: Callable[[GraphBuilder, fx.Node], tuple[fx.Node, fx.Node, fx.Node]],
    *,
    shape: tuple[int, ...] = (-1, HEADS, 3 * WIDTH),
    heads: int = HEADS,
) -> tuple[ModelGraph, TensorSource]:
    """An attention block whose q, k and v are taken from one product of `heads` heads."""
    b = GraphBuilder()
    h = b.embedded()
    product = b.linear(h, "qkv", 3 * heads * WIDTH, bias=True)
    q, k, v = take(b, b.call(aten.reshape.default, product, list(shape)))
    attention = b.call(torch.ops.llmc.attention.default, q, k, v, 0.5)
    out = b.linear(b.call(aten.reshape.default, attention, [-1, heads * WIDTH]), "out", 8)
    return b.finish(b.call(aten.add.Tensor, h, out))


def slices(*bounds: tuple[int, int]) -> Callable[[GraphBuilder, fx.Node], tuple[fx.Node, fx.Node, fx.Node]]:
    def take(b: GraphBuilder, heads: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node]:
        q, k, v = (b.call(aten.slice.Tensor, heads, 2, *pair) for pair in bounds)
        return q, k, v

    return take


def selections(b: GraphBuilder, heads: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node]:
    q, k, v = (b.call(aten.select.int, heads, 2, index) for index in range(3))
    return q, k, v


THIRDS = slices((0, WIDTH), (WIDTH, 2 * WIDTH), (2 * WIDTH, 3 * WIDTH))


def test_separates_slices(golden: Callable[[str, str], None]) -> None:
    graph, source = interleaved(THIRDS)
    golden("passes/separate_qkv.txt", render(rewritten(graph, source, (separate_qkv,)).graph))


@pytest.mark.parametrize(
    ("take", "shape"),
    [
        (selections, (-1, HEADS, 3, WIDTH)),
        (slices((2 * WIDTH, 3 * WIDTH), (0, WIDTH), (WIDTH, 2 * WIDTH)), (-1, HEADS, 3 * WIDTH)),
    ],
)
def test_separates_other_orders(
    take: Callable[[GraphBuilder, fx.Node], tuple[fx.Node, fx.Node, fx.Node]], shape: tuple[int, ...]
) -> None:
    graph, source = interleaved(take, shape=shape)
    result = rewritten(graph, source, (separate_qkv,))
    (linear,) = (n for n in result.graph.graph.nodes if n.name.startswith("linear") and len(n.users) == 3)
    assert all(user.target is aten.slice.Tensor for user in linear.users)


def test_refuses_parts_that_overlap() -> None:
    graph, source = interleaved(slices((0, 4), (2, 6), (8, 12)))
    assert "channels 0 to 4, 2 to 6, 8 to 12 of a head's 12 are read" in refusals(graph, source, (separate_qkv,))


def test_refuses_a_weight_that_others_read() -> None:
    b = GraphBuilder()
    h = b.embedded(width=12)
    weight = b.weight("shared", 24, 12)
    heads = b.call(aten.reshape.default, b.call(torch.ops.llmc.linear.default, h, weight), [-1, 2, 12])
    q, k, v = THIRDS(b, heads)
    attention = b.call(torch.ops.llmc.attention.default, q, k, v, 0.5)
    padded = b.call(aten.cat.default, [b.call(aten.reshape.default, attention, [-1, 8]), h], -1)
    again = b.call(torch.ops.llmc.linear.default, b.linear(padded, "narrow", 12), weight)
    graph, source = b.finish(b.linear(again, "down", 12))
    assert "shared is also used by" in refusals(graph, source, (separate_qkv,))


def test_refuses_a_weight_that_is_computed() -> None:
    b = GraphBuilder()
    h = b.embedded()
    weight = b.call(aten.tanh.default, b.weight("raw", 24, 8))
    heads = b.call(aten.reshape.default, b.call(torch.ops.llmc.linear.default, h, weight), [-1, 2, 12])
    attention = b.call(torch.ops.llmc.attention.default, *THIRDS(b, heads), 0.5)
    graph, source = b.finish(b.linear(b.call(aten.reshape.default, attention, [-1, 8]), "out", 8))
    assert "is computed in the step, not a weight" in refusals(graph, source, (separate_qkv,))


def test_leaves_a_product_that_is_read_whole_and_a_single_head() -> None:
    def whole(b: GraphBuilder, heads: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node]:
        q, k, _ = THIRDS(b, heads)
        total = b.call(aten.sum.dim_IntList, heads, [-1], True)
        return q, k, b.call(aten.mul.Tensor, q, total)

    for graph, source in (interleaved(whole), interleaved(THIRDS, heads=1, shape=(-1, 1, 3 * WIDTH))):
        assert refusals(graph, source, (separate_qkv,)) == ""
