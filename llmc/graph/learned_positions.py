"""How many positions a model has learned, from tables that it reads with arange or slices to the token count."""

from collections.abc import Container

import torch
from torch import SymInt, fx

_ARANGE = (torch.ops.aten.arange.default, torch.ops.aten.arange.start, torch.ops.aten.arange.start_step)


def position_limit(graph: fx.Graph, weights: Container[str]) -> int | None:
    """The fewest rows of a position table, or None if the model has none.

    A table is a weight that is embedded at indices which depend on arange or `positions` and on nothing else.
    """
    rows: list[int] = []
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.embedding.default):
        table, index = node.args[:2]
        if table.name in weights and _only_positions(index):
            rows.append(table.meta["val"].shape[0])
    return min(rows, default=None)


def _only_positions(index: fx.Node) -> bool:
    sources: set[bool] = set()
    pending, seen = [index], {index}
    while pending:
        node = pending.pop()
        if node.op == "placeholder":
            sources.add(node.name == "positions")
            continue
        if node.target in _ARANGE:
            sources.add(True)
            continue
        # Sizes such as sym_size of input_ids say how many positions there are, not which.
        inputs = [n for n in node.all_input_nodes if not isinstance(n.meta["val"], SymInt | int)]
        pending.extend(n for n in inputs if n not in seen)
        seen.update(inputs)
    return sources == {True}
