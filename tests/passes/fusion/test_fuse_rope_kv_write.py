"""Both rotations and the cache write become one; NoPE layers and odd graphs are left alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

from llmc.graph.model_graph import ModelGraph
from llmc.graph.render import render
from llmc.options import BuildOptions
from llmc.passes.fusion.fuse_rope_kv_write import fuse_rope_kv_write
from llmc.passes.pipeline import serving
from llmc.passes.runner import run_pipeline
from tests.graph_builder import GraphBuilder, TensorSource, llama
from tests.passes.pass_checks import histogram, refusals, rewrites, rewritten

aten, ops = torch.ops.aten, torch.ops.llmc
Rotate = Callable[[GraphBuilder, fx.Node, fx.Node], tuple[fx.Node, fx.Node]]


def test_fuses_both_rotations_and_the_write(golden: Callable[[str, str], None]) -> None:
    graph, source = llama(layers=2)
    result = rewritten(graph, source, (fuse_rope_kv_write,))
    golden("passes/fuse_rope_kv_write.txt", render(result.graph))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("half", [1, 2])
def test_fuses_partial_and_interleaved(interleaved: bool, half: int) -> None:
    def rotate(b: GraphBuilder, q: fx.Node, k: fx.Node) -> tuple[fx.Node, fx.Node]:
        angles = b.angles(half)
        return b.call(ops.rope.default, q, *angles, interleaved), b.call(ops.rope.default, k, *angles, interleaved)

    graph, source = _attended(rotate)
    assert histogram(rewritten(graph, source, (fuse_rope_kv_write,)).graph)["llmc.rope_kv_write"] == 1


def test_a_layer_without_rotation_is_no_candidate() -> None:
    graph, source = _attended(lambda b, q, k: (q, k))
    assert refusals(graph, source, (fuse_rope_kv_write,)) == ""


def _queries_not_turned(b: GraphBuilder, q: fx.Node, k: fx.Node) -> tuple[fx.Node, fx.Node]:
    return q, b.call(ops.rope.default, k, *b.angles(), False)


def _two_orders(b: GraphBuilder, q: fx.Node, k: fx.Node) -> tuple[fx.Node, fx.Node]:
    angles = b.angles()
    return b.call(ops.rope.default, q, *angles, True), b.call(ops.rope.default, k, *angles, False)


def _two_angles(b: GraphBuilder, q: fx.Node, k: fx.Node) -> tuple[fx.Node, fx.Node]:
    cos, sin = b.angles()
    other = b.call(aten.mul.Tensor, cos, 0.5)
    return b.call(ops.rope.default, q, cos, sin, False), b.call(ops.rope.default, k, other, sin, False)


def _two_dtypes(b: GraphBuilder, q: fx.Node, k: fx.Node) -> tuple[fx.Node, fx.Node]:
    angles = b.angles()
    narrow = b.call(aten._to_copy.default, k, dtype=torch.bfloat16)
    return b.call(ops.rope.default, q, *angles, False), b.call(ops.rope.default, narrow, *angles, False)


@pytest.mark.parametrize(
    ("rotate", "reason"),
    [
        (_queries_not_turned, "the keys are rotated, but the queries are reshape_default, a aten.reshape.default"),
        (_two_orders, "interleaved is True for the queries and False for the keys"),
        (_two_angles, "cos is getitem for the queries and mul_tensor for the keys"),
        (_two_dtypes, "dtypes differ: q is torch.float32, k is torch.bfloat16, v is torch.float32"),
    ],
)
def test_refuses(rotate: Rotate, reason: str) -> None:
    graph, source = _attended(rotate)
    assert reason in refusals(graph, source, (fuse_rope_kv_write,))


def test_refuses_rotated_keys_that_others_read() -> None:
    b = GraphBuilder()
    q, k, v = _qkv(b)
    angles = b.angles()
    q, k = (b.call(ops.rope.default, x, *angles, False) for x in (q, k))
    y = b.call(aten.add.Tensor, b.call(ops.attention.default, q, k, v, 0.5), k)
    graph, source = b.finish(b.call(aten.reshape.default, y, [-1, 8]))
    assert "rope_default_1 is also used by add_tensor" in refusals(graph, source, (fuse_rope_kv_write,))


def test_rotated_queries_may_be_read_behind_the_attention() -> None:
    b = GraphBuilder()
    q, k, v = _qkv(b)
    angles = b.angles()
    q, k = (b.call(ops.rope.default, x, *angles, False) for x in (q, k))
    y = b.call(aten.add.Tensor, b.call(ops.attention.default, q, k, v, 0.5), q)
    graph, source = b.finish(b.call(aten.reshape.default, y, [-1, 8]))
    assert histogram(rewritten(graph, source, (fuse_rope_kv_write,)).graph)["llmc.rope_kv_write"] == 1


def test_refuses_rotated_queries_that_others_read_first() -> None:
    b = GraphBuilder()
    q, k, v = _qkv(b)
    angles = b.angles()
    q, k = (b.call(ops.rope.default, x, *angles, False) for x in (q, k))
    other = b.call(aten.add.Tensor, q, q)
    y = b.call(aten.add.Tensor, b.call(ops.attention.default, q, k, v, 0.5), other)
    graph, source = b.finish(b.call(aten.reshape.default, y, [-1, 8]))
    assert "rope_default is also used by add_tensor" in refusals(graph, source, (fuse_rope_kv_write,))


def test_refuses_a_cache_that_two_attentions_read() -> None:
    graph, _ = llama(layers=1)
    served = run_pipeline(graph, serving(), BuildOptions()).graph
    (attention,) = served.graph.find_nodes(op="call_function", target=ops.paged_attention.default)
    with served.graph.inserting_after(attention):
        second = served.graph.node_copy(attention)
    attention.replace_all_uses_with(second)
    with served.graph.inserting_after(second):
        both = served.graph.call_function(aten.add.Tensor, (attention, second))
    both.meta["val"] = attention.meta["val"]
    second.replace_all_uses_with(both, delete_user_cb=lambda user: user is not both)
    result = run_pipeline(served, (fuse_rope_kv_write,), BuildOptions())
    assert rewrites(result.records) == 0
    assert [r.reason for r in result.records[0].refusals] == ["kv_cache_0_k is read by 2 attentions"]


def _qkv(b: GraphBuilder) -> tuple[fx.Node, fx.Node, fx.Node]:
    h = b.embedded()
    q, k, v = (
        b.call(aten.reshape.default, b.linear(h, name, heads * 4), [-1, heads, 4])
        for name, heads in (("q", 2), ("k", 1), ("v", 1))
    )
    return q, k, v


def _attended(rotate: Rotate) -> tuple[ModelGraph, TensorSource]:
    b = GraphBuilder()
    q, k, v = _qkv(b)
    q, k = rotate(b, q, k)
    return b.finish(b.call(aten.reshape.default, b.call(ops.attention.default, q, k, v, 0.5), [-1, 8]))
