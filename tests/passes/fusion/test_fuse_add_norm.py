"""A sum and the norm that reads it become one, whoever else reads the sum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from llmc.graph.model_graph import ModelGraph
from llmc.graph.render import render
from llmc.passes.fusion.fuse_add_norm import fuse_add_norm
from tests.graph_builder import GraphBuilder, TensorSource
from tests.passes.pass_checks import histogram, refusals, rewritten

aten = torch.ops.aten


def test_fuses_the_sum_after_a_post_norm(golden: Callable[[str, str], None]) -> None:
    b = GraphBuilder()
    h = b.embedded()
    h = b.call(aten.add.Tensor, h, b.rms_norm(b.linear(h, "o", 8), "post_attention"))
    out = b.linear(b.rms_norm(h, "pre_mlp"), "mlp", 8)
    h = b.call(aten.add.Tensor, h, b.rms_norm(out, "post_mlp"))
    graph, source = b.finish(b.rms_norm(h, "final"))
    result = rewritten(graph, source, (fuse_add_norm,))
    golden("passes/fuse_add_norm.txt", render(result.graph))
    assert histogram(result.graph)["llmc.add_rms_norm"] == 2


def test_fuses_tokens_and_positions_before_a_layer_norm() -> None:
    b = GraphBuilder()
    learned = b.call(torch.ops.llmc.embedding.default, b.positions, b.weight("positions.weight", 32, 8))
    h = b.call(aten.add.Tensor, b.embedded(), learned)
    weight, bias = b.weight("norm.weight", 8), b.weight("norm.bias", 8)
    graph, source = b.finish(b.call(torch.ops.llmc.layer_norm.default, h, weight, bias, 1e-5))
    seen = histogram(rewritten(graph, source, (fuse_add_norm,)).graph)
    assert seen["llmc.add_layer_norm"] == 1
    assert "aten.add.Tensor" not in seen


def test_a_second_norm_reads_the_sum_that_comes_out() -> None:
    b = GraphBuilder()
    h = b.embedded()
    total = b.call(aten.add.Tensor, h, b.call(aten.tanh.default, h))
    graph, source = b.finish(b.call(aten.mul.Tensor, b.rms_norm(total, "first"), b.rms_norm(total, "second")))
    seen = histogram(rewritten(graph, source, (fuse_add_norm,)).graph)
    assert (seen["llmc.add_rms_norm"], seen["llmc.rms_norm"]) == (1, 1)


def _doubled(b: GraphBuilder, h: fx.Node) -> Any:
    return b.call(aten.add.Tensor, h, b.call(aten.tanh.default, h), alpha=2)


def _number(b: GraphBuilder, h: fx.Node) -> Any:
    return b.call(aten.add.Tensor, h, 1.5)


def _vector(b: GraphBuilder, h: fx.Node) -> Any:
    return b.call(aten.add.Tensor, h, b.weight("bias", 8))


def _per_head(b: GraphBuilder, h: fx.Node) -> Any:
    heads = b.call(aten.reshape.default, h, [-1, 2, 4])
    return b.call(aten.add.Tensor, heads, b.call(aten.tanh.default, heads))


@pytest.mark.parametrize(
    ("total", "reason"),
    [
        (_doubled, "argument 'alpha' of aten.add.Tensor is 2, expected 1"),
        (_number, "the sum of embedding_default and 1.5 adds a number"),
        (_vector, "the sum is of float32[T, 8] and float32[8]"),
        (_per_head, "the sum is float32[T, 2, 4], not a matrix of tokens"),
    ],
)
def test_refuses(total: Callable[[GraphBuilder, fx.Node], Any], reason: str) -> None:
    graph, source = _normed(total)
    assert reason in refusals(graph, source, (fuse_add_norm,))


def _normed(total: Callable[[GraphBuilder, fx.Node], Any]) -> tuple[ModelGraph, TensorSource]:
    b = GraphBuilder()
    normed = b.rms_norm(total(b, b.embedded()), "norm")
    return b.finish(b.call(aten.reshape.default, normed, [-1, 8]))


def test_refuses_a_norm_whose_weight_is_computed() -> None:
    b = GraphBuilder()
    h = b.embedded()
    total = b.call(aten.add.Tensor, h, b.call(aten.tanh.default, h))
    weight = b.call(aten.add.Tensor, b.weight("norm.weight", 8), 1)
    graph, source = b.finish(b.call(torch.ops.llmc.rms_norm.default, total, weight, 1e-5))
    assert "is computed after add_tensor, before which the fused op would stand" in refusals(
        graph, source, (fuse_add_norm,)
    )
