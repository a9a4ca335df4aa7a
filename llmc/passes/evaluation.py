"""Compute a value that depends only on positions and constants, for chosen positions.

Masks and rotary angles are written in many ways; what they are is easier to see from their values than from their ops.
"""

from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import SymInt, Tensor, fx
from torch.fx.node import map_arg

from llmc.graph.model_graph import ModelGraph
from llmc.graph.propagate import token_count
from llmc.graph.refusal import Refused
from llmc.graph.weights import Constant, evaluate
from llmc.passes.shapes import fake_of


def value_at(node: fx.Node, graph: ModelGraph, positions: Tensor) -> Tensor:
    """The value of a node for a sequence of tokens at these positions: [T], int64.

    Raises Refused, which names the input or checkpoint tensor that it depends on, or the op that failed.
    """
    values: dict[fx.Node, Any] = {}
    for operand in _inputs_first(node):
        if isinstance(operand.meta["val"], SymInt):
            values[operand] = _size(operand, graph, len(positions))
        elif operand.op == "placeholder":
            values[operand] = _placeholder(operand, graph, positions)
        else:
            args, kwargs = map_arg((operand.args, operand.kwargs), lambda n: values[n])
            assert callable(operand.target)
            try:
                values[operand] = operand.target(*args, **kwargs)
            except (RuntimeError, IndexError, ValueError) as error:
                raise Refused(f"it cannot be computed for {len(positions)} tokens: {error}", operand) from None
    result = values[node]
    if not isinstance(result, Tensor):
        raise Refused(f"it is {result!r}, not a tensor", node)
    return result


def integers_within(node: fx.Node) -> list[int]:
    """The integer constants that a value is computed with."""
    return [
        a
        for operand in _inputs_first(node)
        for a in (*operand.args, *operand.kwargs.values())
        if isinstance(a, int) and not isinstance(a, bool) and a < torch.iinfo(torch.int64).max
    ]


def constants_within(node: fx.Node, graph: ModelGraph) -> list[Tensor]:
    """The constant tensors that a value is computed from."""
    recipes = [graph.weights[n.name] for n in _inputs_first(node) if n.name in graph.weights]
    return [r.value for r in recipes if isinstance(r, Constant)]


def _inputs_first(node: fx.Node) -> list[fx.Node]:
    order: dict[fx.Node, None] = {}
    stack: list[tuple[fx.Node, bool]] = [(node, False)]
    while stack:
        current, is_ready = stack.pop()
        if current in order:
            continue
        # A size is known without the value of its tensor.
        if is_ready or not current.all_input_nodes or isinstance(current.meta["val"], SymInt):
            order[current] = None
            continue
        stack.append((current, True))
        stack.extend((n, False) for n in current.all_input_nodes)
    return list(order)


def _placeholder(node: fx.Node, graph: ModelGraph, positions: Tensor) -> Tensor:
    if node.name == "positions":
        return positions.reshape(*([1] * (fake_of(node).dim() - 1)), -1)
    unknown = _Unknown(node)
    recipe = graph.weights.get(node.name)
    return unknown.load(node.name) if recipe is None else evaluate(recipe, unknown)


def _size(node: fx.Node, graph: ModelGraph, tokens: int) -> int:
    symbol = token_count(graph).node.expr
    return int(node.meta["val"].node.expr.xreplace({symbol: sympy.Integer(tokens)}))


@dataclass(frozen=True)
class _Unknown:
    """A value that is unknown before weights are read. node: the requested input or weight."""

    node: fx.Node

    def names(self) -> tuple[str, ...]:
        """Return no names."""
        return ()

    def load(self, name: str) -> Tensor:
        """Raises Refused."""
        reason = f"it depends on {self.node.name}, whose values are not known when the engine is built"
        raise Refused(reason, self.node)
