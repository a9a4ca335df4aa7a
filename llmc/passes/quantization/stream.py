"""Run a graph over calibration sequences one node at a time, so that memory holds one layer of it.

Every sequence passes a node before the next node runs, weights are read when a node needs them and dropped after, and
values are dropped after their last reader. Between nodes the graph may be rewritten: what was inserted is computed on
the way. So a weight can be quantized with what its input is after all weights before it were.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from llmc.errors import PassError
from llmc.graph.model_graph import ModelGraph
from llmc.graph.weights import WeightSource, evaluate


class Stream:
    """Values of a canonical graph's nodes, while they are needed. sequences: token ids, [length] each."""

    def __init__(self, graph: ModelGraph, source: WeightSource, sequences: Sequence[Tensor]) -> None:
        self._graph, self._source = graph, source
        self._count = len(sequences)
        self._values: dict[fx.Node, list[Any]] = {}
        self._done: set[fx.Node] = set()
        self._constant: dict[fx.Node, bool] = {}
        for node in graph.inputs():
            self._values[node] = [ids if node.name == "input_ids" else torch.arange(len(ids)) for ids in sequences]

    def stops(self, at: Collection[fx.Node]) -> Iterator[fx.Node]:
        """Yield each of these nodes before it runs, in order; ends with the last of them, which is not run."""
        left = set(at)
        for node in list(self._graph.graph.nodes):
            if not left:
                return
            if node in left:
                left.remove(node)
                yield node
            if node.op == "call_function" and left:
                self._run(node)

    def rows(self, node: fx.Node, limit: int | None = None) -> Tensor:
        """A value of every sequence, joined along the tokens; limit: that many rows, spread evenly."""
        joined = torch.cat([value.reshape(-1, value.shape[-1]) for value in self._value(node)])
        if limit is None or len(joined) <= limit:
            return joined
        return joined[torch.linspace(0, len(joined) - 1, limit).long()]

    def parts(self, node: fx.Node) -> Iterator[Tensor]:
        """A value of each sequence in turn."""
        yield from self._value(node)

    def weight(self, node: fx.Node) -> Tensor:
        """The data of a weight placeholder, read now."""
        return evaluate(self._graph.weights[node.name], self._source)

    def _value(self, node: fx.Node) -> list[Any]:
        if node not in self._values:
            self._run(node)
        return self._values[node]

    @torch.inference_mode()
    def _run(self, node: fx.Node) -> None:
        if node in self._values or self._is_constant(node):
            return
        shared = {n: self._constant_value(n) for n in node.all_input_nodes if self._is_constant(n)}
        inputs = {n: self._value(n) for n in node.all_input_nodes if n not in shared}
        assert callable(node.target)
        results = []
        for index in range(self._count):
            values = shared | {n: value[index] for n, value in inputs.items()}
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            results.append(node.target(*args, **kwargs))
        self._values[node] = results
        self._done.add(node)
        for each in inputs:
            if all(user in self._done or user.op == "output" for user in each.users):
                self._values.pop(each, None)

    def _is_constant(self, node: fx.Node) -> bool:
        """Whether a value is made of weights alone."""
        known = self._constant.get(node)
        if known is None:
            if node.op == "placeholder":
                known = node.name in self._graph.weights
            else:
                known = node.op == "call_function" and all(map(self._is_constant, node.all_input_nodes))
            self._constant[node] = known
        return known

    def _constant_value(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            return self.weight(node)
        if node.op != "call_function" or not callable(node.target):
            raise PassError(f"{node.op} node {node.name} has no value", at=node.format_node())
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._constant_value)
        return node.target(*args, **kwargs)
