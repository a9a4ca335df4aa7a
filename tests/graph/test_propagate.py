"""Fake values of new nodes and symbolic step inputs."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import SymInt

from llmc.errors import PassError
from llmc.frontends.capture import capture
from llmc.graph.model_graph import ModelGraph
from llmc.graph.propagate import propagate, symbolic_input, token_count
from llmc.options import BuildOptions
from tests.plain_modules import sdpa_decoder


@pytest.fixture(scope="module")
def captured() -> ModelGraph:
    """A captured graph, to be copied before it is changed."""
    return capture(sdpa_decoder(), BuildOptions()).graph


def test_propagate_gives_back_what_export_gave(captured: ModelGraph) -> None:
    graph = captured.copy()
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default):
        del node.meta["val"]
    for node in graph.graph.find_nodes(op="call_function", target=operator.getitem):
        del node.meta["val"]
    propagate(graph.graph)
    for ours, theirs in zip(graph.graph.nodes, captured.graph.nodes, strict=True):
        if isinstance(theirs.meta.get("val"), torch.Tensor):
            assert ours.meta["val"].shape == theirs.meta["val"].shape
            assert ours.meta["val"].dtype == theirs.meta["val"].dtype


def test_propagate_keeps_the_token_count_symbolic(captured: ModelGraph) -> None:
    graph = captured.copy()
    ids = graph.inputs()[0]
    output = graph.graph.output_node()
    with graph.graph.inserting_before(output):
        flat = graph.graph.call_function(torch.ops.aten.view.default, (ids, [-1]))
        cast = graph.graph.call_function(torch.ops.aten._to_copy.default, (flat,), {"dtype": torch.int32})
    propagate(graph.graph)
    assert cast.meta["val"].dtype == torch.int32
    assert cast.meta["val"].shape[0] == token_count(graph)
    assert isinstance(cast.meta["val"].shape[0], SymInt)


def test_propagate_names_a_node_that_does_not_fit(captured: ModelGraph) -> None:
    graph = captured.copy()
    (weight, *_) = graph.weight_nodes()
    with graph.graph.inserting_before(graph.graph.output_node()):
        graph.graph.call_function(torch.ops.aten.view.default, (weight, [7, 11]))
    with pytest.raises(PassError, match=r"view.* does not fit its inputs"):
        propagate(graph.graph)


def test_propagate_needs_values_of_inputs(captured: ModelGraph) -> None:
    graph = captured.copy()
    with graph.graph.inserting_before(graph.inputs()[0]):
        graph.graph.placeholder("extra")
    with pytest.raises(PassError, match="placeholder node extra has no fake value"):
        propagate(graph.graph)


def expression(size: Any) -> Any:
    """The sympy expression of a symbolic size."""
    assert isinstance(size, SymInt)
    return size.node.expr


def test_symbolic_inputs_share_their_symbols(captured: ModelGraph) -> None:
    graph = captured.copy()
    slots = symbolic_input(graph, "slot_mapping", ("T",), torch.int32)
    starts = symbolic_input(graph, "query_starts", ("R+1",), torch.int32)
    lengths = symbolic_input(graph, "context_lens", ("R",), torch.int32)
    tables = symbolic_input(graph.copy(), "block_tables", ("R", "B"), torch.int32)
    cache = symbolic_input(graph, "kv_cache_0_k", ("blocks", 2, 16, 8), torch.float32)
    assert slots.shape[0] == token_count(graph)
    assert slots.dtype == torch.int32
    requests = expression(lengths.shape[0])
    assert expression(starts.shape[0]) == requests + 1
    assert expression(tables.shape[0]) == requests
    assert len({expression(size) for size in (slots.shape[0], lengths.shape[0], tables.shape[1], cache.shape[0])}) == 4
    assert cache.shape[1:] == (2, 16, 8)
