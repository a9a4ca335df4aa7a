"""Products of one input become one, unless a bias, a dtype or another reader of a weight is in the way."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

from llmc.graph.model_graph import ModelGraph
from llmc.graph.render import render
from llmc.passes.fusion.merge_qkv import merge_qkv
from tests.graph_builder import GraphBuilder, TensorSource, llama
from tests.passes.pass_checks import histogram, refusals, rewritten

aten = torch.ops.aten


def test_merges_q_k_and_v(golden: Callable[[str, str], None]) -> None:
    graph, source = llama(layers=1)
    result = rewritten(graph, source, (merge_qkv,))
    golden("passes/merge_qkv.txt", render(result.graph))


@pytest.mark.parametrize("bias", [False, True])
def test_merges_any_two_products_of_one_input(bias: bool) -> None:
    graph, source = _two_products(lambda b, h, name: b.linear(h, name, 8, bias=bias))
    result = rewritten(graph, source, (merge_qkv,))
    assert histogram(result.graph)["llmc.linear"] == 1
    assert [n.name for n in result.graph.weight_nodes() if "left" in n.name] == [
        "left_right_weight",
        *(["left_right_bias"] if bias else []),
    ]


def test_refuses_a_bias_on_one_side() -> None:
    graph, source = _two_products(lambda b, h, name: b.linear(h, name, 8, bias=name == "left"))
    assert refusals(graph, source, (merge_qkv,)).endswith(
        "linear_default has the bias left_bias, linear_default_1 of the same input None"
    )


def test_refuses_a_weight_that_others_read() -> None:
    b = GraphBuilder()
    h = b.embedded()
    shared = b.weight("shared", 8, 8)
    first = b.call(torch.ops.llmc.linear.default, h, shared)
    second = b.linear(h, "second", 8)
    third = b.call(
        torch.ops.llmc.linear.default, b.call(aten.tanh.default, b.call(aten.mul.Tensor, first, second)), shared
    )
    graph, source = b.finish(third)
    assert "shared is also used by" in refusals(graph, source, (merge_qkv,))


def test_refuses_weights_of_two_dtypes() -> None:
    graph, source = _two_products(
        lambda b, h, name: b.call(
            torch.ops.llmc.linear.default,
            h,
            b.weight(name, 8, 8, dtype=torch.float32 if name == "left" else torch.bfloat16),
        )
    )
    assert refusals(graph, source, (merge_qkv,)).endswith("weight right is torch.bfloat16, left torch.float32")


def test_refuses_a_weight_computed_in_the_step() -> None:
    def product(b: GraphBuilder, h: fx.Node, name: str) -> fx.Node:
        doubled = b.call(aten.mul.Tensor, b.weight(name, 8, 8), 2.0)
        return b.call(torch.ops.llmc.linear.default, h, doubled)

    graph, source = _two_products(product)
    assert refusals(graph, source, (merge_qkv,)).endswith("mul_tensor is computed in the step, not a weight")


def _two_products(product: Callable[[GraphBuilder, fx.Node, str], fx.Node]) -> tuple[ModelGraph, TensorSource]:
    b = GraphBuilder()
    h = b.embedded()
    left, right = (product(b, h, name) for name in ("left", "right"))
    return b.finish(b.call(aten.mul.Tensor, left, right))
