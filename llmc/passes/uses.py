"""Queries shared by many passes: the readers of a node, and values known at build time."""

from collections.abc import Collection
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from llmc.graph.model_graph import ModelGraph
from llmc.graph.refusal import Refused
from llmc.graph.verify import SHAPE_OPS
from llmc.graph.weights import WeightSource, evaluate

aten = torch.ops.aten

# Layout ops on one tensor; concatenation is not among them.
_JOINING = {getitem, aten.cat.default, aten.stack.default}
DATA_MOVEMENT = (SHAPE_OPS - _JOINING) | {aten._to_copy.default, aten.view.default}


def used_only_by(node: fx.Node, users: Collection[fx.Node], at: fx.Node | None = None) -> None:
    """Raise Refused if something but `users` reads the node. at: the node that is refused for it; None is itself."""
    others = tuple(user for user in node.users if user not in users)
    if others:
        seen = ", ".join(f"{user.name} ({call_of(user)})" for user in others)
        wanted = ", ".join(user.name for user in node.users if user in users) or "those of the match"
        names = ", ".join(user.name for user in others)
        raise Refused(
            f"{node.name} is also used by {seen}", at or node, f"no user but {wanted}", f"the user {names}", others
        )


def is_weight(node: Any, graph: ModelGraph) -> bool:
    """Whether this is a node whose value is known when the engine is built: made only from weights, or a weight
    itself."""
    if not isinstance(node, fx.Node):
        return False
    if node.op == "placeholder":
        return node.name in graph.weights
    return bool(node.all_input_nodes) and all(is_weight(n, graph) for n in node.all_input_nodes)


def weight_value(node: fx.Node, graph: ModelGraph, source: WeightSource, rank: int = 0) -> Any:
    """The value of a node that depends on weights only, on a rank."""
    if node.op == "placeholder":
        return evaluate(graph.weights[node.name], source, rank)
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: weight_value(n, graph, source, rank))
    assert callable(node.target)
    return node.target(*args, **kwargs)


def call_of(value: object) -> str:
    """The op that a node calls, or a description of another value."""
    if not isinstance(value, fx.Node):
        return repr(value)
    return str(value.target) if isinstance(value.target, OpOverload) else f"{value.op} {value.name}"
