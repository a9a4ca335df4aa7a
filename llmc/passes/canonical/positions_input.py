"""Take positions from the step's input where the model counts them itself.

    arange(T)  →  positions
    weight[:T]  →  embedding(weight, positions)
Must have: the count of this step's tokens as the end, from 0 in steps of 1; used as positions (in arithmetic, a
comparison or a table lookup), not as indices of this step's rows, which are other numbers once requests are batched.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import SymInt, fx

from llmc.graph.call_arguments import call_arguments
from llmc.graph.model_graph import ModelGraph
from llmc.graph.pointwise import POINTWISE
from llmc.graph.refusal import Refusal
from llmc.graph.stage import Stage
from llmc.options import BuildOptions
from llmc.passes.node_rules import Call, Rule, apply_rules
from llmc.passes.rewrite import GraphPass, Numerics
from llmc.passes.rewrite_log import RewriteLog
from llmc.passes.shapes import same_size, tensor_of
from llmc.passes.uses import DATA_MOVEMENT

aten = torch.ops.aten


def _run(graph: ModelGraph, options: BuildOptions, log: RewriteLog) -> None:
    positions = next(n for n in graph.inputs() if n.name == "positions")
    value = positions.meta["val"]
    source = positions if value.dim() == 1 else Call(aten.squeeze.dim, (positions, 0))
    tokens = value.shape[-1]
    weights = frozenset(n.name for n in graph.weight_nodes())
    counted = _counted_rule(source, tokens)
    rules: dict[Any, Rule] = dict.fromkeys(_ARANGES, counted)
    apply_rules(graph, rules | {aten.slice.Tensor: _first_rows_rule(source, tokens, weights)}, log)


def _counted_rule(positions: fx.Node | Call, tokens: Any) -> Rule:
    def rule(node: fx.Node) -> fx.Node | Call | Refusal | None:
        value = tensor_of(node)
        arguments = call_arguments(node)
        if value is None or not same_size(value.shape[0], tokens):
            return None
        start, step = arguments.get("start", 0), arguments.get("step", 1)
        if start != 0 or step != 1:
            return Refusal(f"positions count from {start} in steps of {step}, expected from 0 in steps of 1", node)
        strange = _strange_use(node)
        if strange is not None:
            return Refusal(f"{strange.name} ({strange.target}) uses arange(T) as something other than positions", node)
        if value.dtype is torch.int64:
            return positions
        return Call(aten._to_copy.default, (positions,), {"dtype": value.dtype})

    return rule


def _strange_use(node: fx.Node) -> fx.Node | None:
    for user in node.users:
        if user.target in DATA_MOVEMENT:
            strange = _strange_use(user)
            if strange is not None:
                return strange
        elif user.target not in _USES:
            return user
    return None


def _first_rows_rule(positions: fx.Node | Call, tokens: Any, weights: frozenset[str]) -> Rule:
    def rule(node: fx.Node) -> Call | None:
        """The first T rows of a table of weights."""
        arguments = call_arguments(node)
        table, value = arguments["self"], tensor_of(node)
        is_table = isinstance(table, fx.Node) and table.name in weights and value is not None and value.dim() == 2
        if not is_table or value is None or arguments["dim"] != 0 or arguments["step"] != 1:
            return None
        # A square table with a second slice by T is a mask, which the attention passes look at as a whole.
        is_mask = any(any(isinstance(s, SymInt) for s in u.meta["val"].shape[1:]) for u in node.users if _is_slice(u))
        if arguments["start"] or not same_size(value.shape[0], tokens) or is_mask:
            return None
        return Call(aten.embedding.default, (table, positions))

    return rule


def _is_slice(node: fx.Node) -> bool:
    return node.target is aten.slice.Tensor


_ARANGES = (aten.arange.default, aten.arange.start, aten.arange.start_step)
_USES = POINTWISE.keys() | {aten.embedding.default, aten.matmul.default}

positions_input = GraphPass("positions_input", _run, Numerics.EXACT, Stage.CAPTURED)
