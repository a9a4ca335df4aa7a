"""The inputs of a step: finding and adding them, and what their symbolic sizes are called."""

from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from llmc.graph.model_graph import ModelGraph
from llmc.graph.propagate import symbolic_input
from llmc.program import HIDDEN, group_input

# One axis that shows each symbol. T: tokens. L: logit rows. R: requests. B: blocks per request. N: blocks of the pool.
# S: slots of states.
_SHOWN_BY = (
    ("input_ids", -1, "T"),
    ("logit_rows", 0, "L"),
    ("context_lens", 0, "R"),
    ("block_tables", 1, "B"),
    ("kv_cache_0_k", 0, "N"),
    ("state_0", 0, "S"),
)


def symbol_names(graph: fx.Graph) -> dict[sympy.Symbol, str]:
    """T, L, R, B, N or S for each symbol of the fake values that a step input shows."""
    inputs = {node.name: node.meta.get("val") for node in graph.find_nodes(op="placeholder")}
    names: dict[sympy.Symbol, str] = {}
    for name, axis, symbol in _SHOWN_BY:
        value = inputs.get(name)
        size: Any = value.shape[axis] if isinstance(value, torch.Tensor) else 0
        if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol):
            names.setdefault(size.node.expr, symbol)
    return names


def step_input(graph: ModelGraph, name: str) -> fx.Node | None:
    """The step input of that name, None if the graph has none."""
    return next((n for n in graph.inputs() if n.name == name), None)


def group_inputs(graph: ModelGraph) -> dict[str, str]:
    """Map the input names of cache groups 1 and up to those of group 0, in order."""
    groups = enumerate(graph.policies, 1)
    return {group_input(name, group): name for group, policy in groups for name in policy.inputs}


def hidden_width(graph: ModelGraph) -> int:
    """Columns of the hidden states that the graph reads; 0 if it reads none."""
    node = step_input(graph, HIDDEN)
    return 0 if node is None else int(node.meta["val"].shape[-1])


def has_selected_logits(graph: ModelGraph) -> bool:
    """Whether the graph returns one row of logits for each entry of logit_rows: an engine has room for no more."""
    return is_of_logit_rows(graph, graph.logits())


def is_of_logit_rows(graph: ModelGraph, node: fx.Node) -> bool:
    """Whether a tensor has one row for each entry of logit_rows."""
    rows = step_input(graph, "logit_rows")
    return rows is not None and statically_known_true(node.meta["val"].shape[0] == rows.meta["val"].shape[0])


def add_step_input(graph: ModelGraph, name: str, shape: tuple[str | int, ...], dtype: torch.dtype) -> fx.Node:
    """Append a step input after the present ones. shape: sizes as in `symbolic_input`, such as ("R+1",)."""
    value = symbolic_input(graph, name, shape, dtype)
    with graph.graph.inserting_after(graph.inputs()[-1]):
        node = graph.graph.placeholder(name)
    node.meta["val"] = value
    return node
