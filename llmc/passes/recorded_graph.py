"""An fx.Graph whose new nodes know which rewrite made them, which source line they stand for, and their fake value."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from llmc.graph.fake_value import FakeValues
from llmc.graph.model_graph import ModelGraph
from llmc.graph.weights import Constant, Recipe


class RecordedGraph(fx.Graph):
    """The graph that passes change. `record` names the rewrite under way; nodes made before the first are as copied.

    made: the names of the nodes that each rewrite created. fresh: calls whose fake value was computed by their op, with
    its inputs (arguments, keywords, value), until ShapeCheck reads them. fakes: fake values of the graph's calls.
    """

    def __init__(self, fakes: FakeValues) -> None:
        super().__init__()
        self.fakes = fakes
        self.made: dict[str, list[str]] = {}
        self.fresh: dict[fx.Node, tuple[Any, Any, Any]] = {}
        self._rewrite: str | None = None
        self._source: str | None = None
        self._prefix = ""

    def record(self, rewrite: str, source: str | None, prefix: str = "") -> None:
        """Nodes created from now on belong to this rewrite and stand for this stack trace.

        prefix: Prefix of their names. Added passes have a separate one, so that the names that llmc's passes give later
        stay the same as without them.
        """
        self._rewrite = rewrite
        self._source = source
        self._prefix = prefix

    def create_node(
        self,
        op: str,
        target: Any,
        args: tuple[Any, ...] | None = None,
        kwargs: dict[str, Any] | None = None,
        name: str | None = None,
        type_expr: Any = None,
    ) -> fx.Node:
        """Create a node as fx.Graph.create_node does, with meta filled in; a call is named after its op, without the
        overload."""
        if self._rewrite is not None and isinstance(target, OpOverload):
            name = self._prefix + target._schema.name.split("::")[1].lstrip("_")
        node = super().create_node(op, target, args, kwargs, name, type_expr)
        if self._rewrite is not None:
            node.meta["rewrite"] = self._rewrite
            self.made.setdefault(self._rewrite, []).append(node.name)
            if self._source is not None:
                node.meta["stack_trace"] = self._source
            if op == "call_function":
                value = node.meta["val"] = self.fakes.of(node)
                self.fresh[node] = node.args, node.kwargs, value
        return node


def recorded_copy(graph: ModelGraph) -> tuple[ModelGraph, RecordedGraph]:
    """A copy of a model graph for passes to change, and its fx graph."""
    nodes = RecordedGraph(graph.fakes)
    mapping: dict[fx.Node, fx.Node] = {}
    nodes.output(nodes.graph_copy(graph.graph, mapping))
    return replace(graph, graph=nodes, weights=dict(graph.weights)), nodes


def new_weight(graph: ModelGraph, name: str, recipe: Recipe, like: Any) -> fx.Node:
    """A placeholder after the last one, for a tensor whose fake value is `like`."""
    last = graph.graph.find_nodes(op="placeholder")[-1]
    with graph.graph.inserting_after(last):
        node = graph.graph.placeholder(name)
    node.target = node.name
    node.meta["val"] = like
    graph.weights[node.name] = recipe
    return node


def constant_weight(graph: ModelGraph, name: str, value: Tensor) -> fx.Node:
    """The weight that holds these numbers already, or a new one: layers with the same share it."""
    for node in graph.weight_nodes():
        recipe = graph.weights[node.name]
        if isinstance(recipe, Constant) and recipe.value.dtype is value.dtype and torch.equal(recipe.value, value):
            return node
    like = graph.inputs()[0].meta["val"].new_empty(value.shape, dtype=value.dtype)
    return new_weight(graph, name, Constant(value), like)
