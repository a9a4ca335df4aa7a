"""Groups of loops: every loop node in one group, one space in a group, no cycles between groups; and the gain taken."""

from __future__ import annotations

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from llmc.codegen.dependencies import dependencies, is_loop_node
from llmc.codegen.fuse_groups import Group, fuse_groups
from llmc.codegen.views import find_views
from llmc.graph.model_graph import ModelGraph
from tests.codegen.random_graphs import random_graph
from tests.codegen.tiny_models import CHANNELS, HEAD_DIM, HEADS, VOCABULARY, GraphBuilder, aten, ops


def groups_of(graph: ModelGraph) -> tuple[Group, ...]:
    return fuse_groups(graph, *find_views(graph))


def start() -> tuple[GraphBuilder, fx.Node]:
    b = GraphBuilder()
    return b, b.call(ops.embedding.default, b.inputs["input_ids"], b.weight("embed", VOCABULARY, CHANNELS))


def finish(b: GraphBuilder, x: fx.Node) -> ModelGraph:
    return b.finish(b.call(ops.select_rows.default, x, b.inputs["logit_rows"]))[0]


def group_names(graph: ModelGraph) -> list[list[str]]:
    return [[str(n.target).split(".")[1] for n in group.nodes] for group in groups_of(graph)]


@settings(max_examples=12, derandomize=True)
@given(seed=st.integers(0, 10**6), nodes=st.integers(1, 30))
def test_groups_are_convex_and_complete(seed: int, nodes: int) -> None:
    graph, _ = random_graph(seed, nodes)
    views, copies = find_views(graph)
    edges = dependencies(graph, views, copies)
    groups = fuse_groups(graph, views, copies)
    members = [node for group in groups for node in group.nodes]
    assert len(members) == len(set(members))
    assert set(members) == {node for node in edges if is_loop_node(node, copies, views)}
    home = {node: node for node in edges} | {node: group.nodes[0] for group in groups for node in group.nodes}
    between = nx.DiGraph((home[a], home[b]) for a, b in edges.edges if home[a] is not home[b])
    assert nx.is_directed_acyclic_graph(between)


def test_a_chain_is_one_group() -> None:
    b, x = start()
    y = b.call(aten.mul.Tensor, b.call(aten.tanh.default, x), 2.0)
    assert group_names(finish(b, y)) == [["tanh", "mul"]]


def test_a_norm_is_one_group() -> None:
    b, x = start()
    mean = b.call(aten.mean.dim, b.call(aten.pow.Tensor_Scalar, x, 2), [-1], True)
    y = b.call(aten.mul.Tensor, x, b.call(aten.rsqrt.default, b.call(aten.add.Tensor, mean, 1e-5)))
    assert group_names(finish(b, y)) == [["pow", "mean", "add", "rsqrt", "mul"]]


def test_a_dropped_axis_that_comes_back_is_no_obstacle() -> None:
    b, x = start()
    total = b.call(aten.unsqueeze.default, b.call(aten.sum.dim_IntList, x, [-1]), -1)
    assert group_names(finish(b, b.call(aten.div.Tensor, x, total))) == [["sum", "div"]]


def test_readers_of_one_value_share_its_load() -> None:
    b, x = start()
    left, right = b.call(aten.tanh.default, x), b.call(aten.relu.default, x)
    w = b.weight("w", CHANNELS, CHANNELS)
    y = b.call(aten.add.Tensor, b.call(ops.linear.default, left, w), b.call(ops.linear.default, right, w))
    assert group_names(finish(b, y)) == [["tanh", "relu"], ["add"]]


def test_what_a_product_separates_stays_apart() -> None:
    b, x = start()
    before = b.call(aten.tanh.default, x)
    product = b.call(ops.linear.default, before, b.weight("w", CHANNELS, CHANNELS))
    assert group_names(finish(b, b.call(aten.add.Tensor, before, product))) == [["tanh"], ["add"]]


@pytest.mark.parametrize("turn", [False, True], ids=["other axes", "other order"])
def test_other_walks_are_other_groups(turn: bool) -> None:
    b, x = start()
    heads = b.call(aten.reshape.default, b.call(aten.tanh.default, x), [-1, HEADS, HEAD_DIM])
    if turn:
        heads = b.call(aten.reshape.default, heads, [-1, HEAD_DIM, HEADS])
        heads = b.call(aten.transpose.int, heads, 1, 2)
    total = b.call(aten.sum.dim_IntList, heads, [-1], True)
    y = b.call(aten.reshape.default, b.call(aten.add.Tensor, heads, total), [-1, CHANNELS])
    names = group_names(finish(b, y))
    assert names[:2] == [["tanh"], ["sum", "add"]]


def test_tokens_and_logit_rows_do_not_mix() -> None:
    b, x = start()
    selected = b.call(ops.select_rows.default, b.call(aten.tanh.default, x), b.inputs["logit_rows"])
    graph, _ = b.finish(b.call(aten.neg.default, selected))
    assert group_names(graph) == [["tanh"], ["neg"]]


def test_a_reduction_over_one_element_keeps_its_own_space() -> None:
    b, x = start()
    peak = b.call(aten.amax.default, x, [-1], True)
    again = b.call(aten.sum.dim_IntList, peak, [-1], True)
    y = b.call(aten.sub.Tensor, x, again)
    for group in groups_of(finish(b, y)):
        if any(n.target is aten.sum.dim_IntList for n in group.nodes):
            assert group.space[-1] == 1
