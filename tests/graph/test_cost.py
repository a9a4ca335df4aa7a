"""Bytes and operations of nodes, counted by hand for a small llama, and the time they predict."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import fx

from llmc.graph.cost import group_cost, node_cost
from llmc.graph.model_graph import ModelGraph
from llmc.graph.op_record import A, C, L, R, T
from llmc.options import BuildOptions
from llmc.passes.pipeline import fusion, serving
from llmc.passes.rewrite import Pass
from llmc.passes.runner import run_pipeline
from tests.graph_builder import GraphBuilder, llama

aten, ops = torch.ops.aten, torch.ops.llmc


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_reads_its_weight_and_moves_its_rows(dtype: torch.dtype) -> None:
    graph, _ = llama(layers=1, dtype=dtype)
    cost = node_cost(_only(_run(graph, (*serving(), *fusion())), ops.linear.default))
    width = dtype.itemsize
    assert cost.bytes_moved == 16 * 8 * width + (8 + 16) * width * T
    assert cost.flops == 2 * 16 * 8 * T


def test_epilogues_add_what_they_read() -> None:
    graph, _ = llama(layers=1)
    optimized = _run(graph, (*serving(), *fusion()))
    down = optimized.graph.find_nodes(op="call_function", target=ops.fused_linear.default)[1]
    # The last layer's MLP runs for the rows that want logits: x of 12, residual and y of 8 channels.
    assert node_cost(down).bytes_moved == 4 * (8 * 12 + (12 + 8 + 8) * L)
    gated = _only(optimized, ops.gated_linear.default)
    assert node_cost(gated).bytes_moved.subs(L, 0) == 4 * 24 * 8
    assert node_cost(gated).flops == 2 * 24 * 8 * L


def test_attention_reads_the_cache_by_position() -> None:
    graph, _ = llama(layers=1)
    attention = _only(_run(graph, serving()), ops.paged_attention.default)
    cost = node_cost(attention)
    # q and y of 8 channels, one head's k and v of 4 each, R + 1 query starts and R context lengths of int32.
    assert cost.bytes_moved == 4 * (16 * T + 8 * C + 2 * R + 1)
    assert cost.flops == 2 * 2 * (4 + 4) * A


def test_a_window_caps_what_attention_reads() -> None:
    b = GraphBuilder()
    x = b.call(aten.reshape.default, b.embedded(), [-1, 1, 8])
    y = b.call(ops.attention.default, x, x, x, 0.5, 3)
    graph, _ = b.finish(b.call(aten.reshape.default, y, [-1, 8]))
    cost = node_cost(_only(_run(graph, serving()), ops.paged_attention.default))
    values = {T: 2, R: 2, C: 100, A: 100}
    assert cost.flops.subs(values) == 2 * 16 * 3 * 2
    assert cost.bytes_moved.subs(values) == 4 * (16 * 2 + 16 * 3 * 2 + 2 * 2 + 1)


def test_rows_that_are_read_exactly_are_not_read_as_codes() -> None:
    graph, _ = llama(layers=1)
    options = BuildOptions(kv_cache="int8:recent=16", max_model_len=64)
    cost = node_cost(_only(run_pipeline(graph, serving(), options).graph, ops.paged_attention.default))
    plain = 4 * (16 * 2 + 2 * 2 + 1)
    # Two requests. Keys and values of one head: codes of 4 + 2 bytes each, exact rows of 16 bytes each.
    for context, codes, exact in ((100, 68, 32), (20, 0, 20)):
        values = {T: 2, R: 2, C: context, A: context}
        assert cost.bytes_moved.subs(values) == plain + 2 * 6 * codes + 2 * 16 * exact


def test_an_embedding_moves_only_the_rows_looked_up() -> None:
    graph, _ = llama(layers=1)
    cost = node_cost(_only(graph, ops.embedding.default))
    assert cost.bytes_moved == (8 + 2 * 8 * 4) * T
    assert cost.flops == 0


def test_a_write_moves_keys_and_values_in_and_out() -> None:
    graph, _ = llama(layers=1)
    cost = node_cost(_only(_run(graph, serving()), ops.kv_write.default))
    assert cost.bytes_moved == (2 * (4 + 4) * 4 + 4) * T


def test_views_and_placeholders_are_free() -> None:
    graph, _ = llama(layers=1)
    free = [*graph.graph.find_nodes(op="placeholder"), *graph.graph.find_nodes(op="output")]
    free += graph.graph.find_nodes(op="call_function", target=aten.reshape.default)
    assert {(c.bytes_moved, c.flops) for c in map(node_cost, free)} == {(0, 0)}


def test_a_group_keeps_what_passes_inside_in_registers() -> None:
    b = GraphBuilder()
    h = b.embedded()
    chain = [b.call(aten.mul.Tensor, h, b.weight("scale", 8))]
    chain.append(b.call(aten.reshape.default, chain[-1], [-1, 8]))
    chain.append(b.call(aten.tanh.default, chain[-1]))
    chain.append(b.call(aten.add.Tensor, chain[-1], h))
    b.finish(chain[-1])
    cost = group_cost(chain)
    assert cost.bytes_moved == 4 * 8 + 2 * 8 * 4 * T
    assert cost.flops == 3 * 8 * T
    alone = sum((node_cost(n).bytes_moved for n in chain), start=T * 0)
    assert alone.subs({T: 1}) > cost.bytes_moved.subs({T: 1})


def test_codes_that_two_products_read_are_read_as_codes_by_each() -> None:
    """A table that is tied to the output: the value that the graph shows between is in no kernel's memory."""
    b = GraphBuilder()
    h = b.embedded()
    codes, scales = b.weight("codes", 16, 8, dtype=torch.int8), b.weight("scales", 16, 1)
    value = b.call(ops.dequantize.default, codes, scales, None, "int8", torch.float32)
    products = [b.call(ops.linear.default, x, value, None) for x in (h, b.call(aten.tanh.default, h))]
    b.finish(b.call(aten.add.Tensor, *products))
    for product in products:
        assert group_cost((value, product)).bytes_moved == 16 * 8 + 16 * 4 + (8 + 16) * 4 * T


def test_fusion_never_moves_more() -> None:
    graph, _ = llama(layers=2)
    served = _run(graph, serving())
    before, after = ([node_cost(node) for node in g.graph.nodes] for g in (served, _run(served, fusion())))
    step = {T: 5, L: 2, R: 2, C: 60, A: 80}
    assert sum(c.bytes_moved.subs(step) for c in after) < sum(c.bytes_moved.subs(step) for c in before)
    assert sum(c.flops.subs(step) for c in after) <= sum(c.flops.subs(step) for c in before)
    assert all(cost.bytes_moved.free_symbols <= {T, L, R, C, A} for cost in before)


def _only(graph: ModelGraph, target: torch._ops.OpOverload) -> fx.Node:
    node: fx.Node
    (node,) = graph.graph.find_nodes(op="call_function", target=target)
    return node


def _run(graph: ModelGraph, passes: Sequence[Pass]) -> ModelGraph:
    return run_pipeline(graph, passes, BuildOptions()).graph
