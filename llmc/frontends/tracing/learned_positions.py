"""How many positions a model has learned, from tables that it reads with arange or slices to the token count."""

from collections.abc import Container

import torch
from torch import SymInt, fx

_ARANGE = (torch.ops.aten.arange.default, torch.ops.aten.arange.start, torch.ops.aten.arange.start_step)


def position_limit(graph: fx.Graph, weights: Container[str]) -> int | None:
    """The fewest rows of a position table, or None if the model has none.

    A table is a weight that is embedded at indices which depend on arange or `positions` and on nothing else.
    """
    lookups = graph.find_nodes(op="call_function", target=torch.ops.aten.embedding.default)
    read = [node.args[:2] for node in lookups]
    tables = [table for table, index in read if table.name in weights and _only_positions(index)]
    return min((table.meta["val"].shape[0] for table in tables), default=None)


def _only_positions(index: fx.Node) -> bool:
    sources: set[bool] = set()
    pending, seen = [index], {index}
    while pending:
        node = pending.pop()
        if node.op == "placeholder" or node.target in _ARANGE:
            sources.add(node.op != "placeholder" or node.name == "positions")
            continue
        # Sizes such as sym_size of input_ids say how many positions there are, not which.
        inputs = [n for n in node.all_input_nodes if not isinstance(n.meta["val"], SymInt | int)]
        pending.extend(n for n in inputs if n not in seen)
        seen.update(inputs)
    return sources == {True}
