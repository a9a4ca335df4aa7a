"""A small graph evaluated over symbols: inputs and stored weights are symbols, weights are made by their recipes."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import SymInt, Tensor, fx

from llmc.debug.prove.symbolic_tensor import Pool
from llmc.graph.model_graph import ModelGraph
from llmc.graph.weights import evaluate as evaluate_recipe
from llmc.passes.example import TOKENS


def evaluate(graph: ModelGraph, pool: Pool, given: Mapping[str, Any]) -> dict[str, Tensor]:
    """Evaluate the graph: its results and the inputs it has written, by name. given: integer tensors, by name."""
    values: dict[fx.Node, Any] = {}
    source = _SymbolicWeights(graph, pool)
    with torch.no_grad():
        for node in graph.graph.nodes:
            if node.op == "placeholder":
                if node.name in graph.weights:
                    values[node] = evaluate_recipe(graph.weights[node.name], source)
                elif isinstance(given.get(node.name), Tensor):
                    values[node] = given[node.name]
                else:
                    values[node] = pool.symbols(node.name, _sizes(node), node.meta["val"].dtype)
            elif node.op == "call_function":
                args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: values[n])
                values[node] = node.target(*args, **kwargs)
    (returned,) = graph.graph.output_node().args
    outputs = returned if isinstance(returned, tuple | list) else (returned,)
    named = {f"result {i}" if len(outputs) > 1 else "result": values[n] for i, n in enumerate(outputs)}
    written = {n.name: values[n] for n in graph.inputs()}
    return {name: value for name, value in (named | written).items() if isinstance(value, Tensor)}


class _SymbolicWeights:
    """Stored tensors as symbols."""

    def __init__(self, graph: ModelGraph, pool: Pool) -> None:
        self._pool = pool
        self._shapes = {n.name: _sizes(n) for n in graph.weight_nodes()}

    def names(self) -> tuple[str, ...]:
        return tuple(self._shapes)

    def load(self, name: str) -> Tensor:
        return self._pool.symbols(name, self._pool.shapes.setdefault(name, self._shapes.get(name, ())))


def _sizes(node: fx.Node) -> tuple[int, ...]:
    return tuple(TOKENS if isinstance(size, SymInt) else int(size) for size in node.meta["val"].shape)
