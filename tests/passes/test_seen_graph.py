"""Whatever a pass may change of a graph is noticed, whether it says so or not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx

from llmc.graph.model_graph import ModelGraph, StateSpec
from llmc.graph.stage import Stage
from llmc.graph.weights import Stored
from llmc.passes.seen_graph import SeenGraph
from tests.passes.canonical.pattern_graphs import PatternGraph

aten = torch.ops.aten


def _body(x: Any) -> Any:
    return aten.exp.default(aten.neg.default(x))


def _node(graph: ModelGraph, target: Any = aten.neg.default) -> fx.Node:
    node: fx.Node
    (node,) = graph.graph.find_nodes(op="call_function", target=target)
    return node


def _add(graph: ModelGraph) -> None:
    with graph.graph.inserting_after(_node(graph)):
        graph.graph.call_function(aten.neg.default, (_node(graph),))


def _move(graph: ModelGraph) -> None:
    _node(graph).prepend(_node(graph, aten.exp.default))


def _skip(graph: ModelGraph) -> None:
    _node(graph, aten.exp.default).args = _node(graph).args


def _rename(graph: ModelGraph) -> None:
    _node(graph).name = "other"


def _retarget(graph: ModelGraph) -> None:
    _node(graph).target = aten.abs.default


def _revalue(graph: ModelGraph) -> None:
    _node(graph).meta["val"] = torch.empty(1)


def _reweigh(graph: ModelGraph) -> None:
    graph.weights[next(iter(graph.weights))] = Stored("another", torch.float32)


def _restage(graph: ModelGraph) -> None:
    graph.stage = Stage.SERVING


def _add_state(graph: ModelGraph) -> None:
    graph.states = (StateSpec(0, (1,)),)


CHANGES = [_add, _move, _skip, _rename, _retarget, _revalue, _reweigh, _restage, _add_state]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_noticed(change: Callable[[ModelGraph], None]) -> None:
    graph = PatternGraph(_body).graph
    graph = replace(graph, weights={**graph.weights, "w": Stored("w", torch.float32)})
    seen = SeenGraph()
    assert not seen.is_this(graph)
    seen.see(graph)
    assert seen.is_this(graph)
    change(graph)
    assert not seen.is_this(graph)
    seen.see(graph)
    assert seen.is_this(graph)
