"""Read positions from the step's input where the model computes them itself.

    arange(T)  →  positions
    weight[:T]  →  embedding(weight, positions)
    zeros(1, T), ones(1, T), full([1, T], x)  →  full_like(positions, x), expanded along further axes
    cumsum(input_ids != padding)  →  positions + 1, since no request is padded
Must have: the count of this step's tokens as the end, from 0 in steps of 1; used as positions (in arithmetic, a
comparison or a table lookup), not as indices of this step's rows, which are other numbers once requests are batched.
"""

from functools import partial
from typing import Any

import torch
from torch import SymInt, fx

from llmc.graph.call_arguments import call_arguments
from llmc.graph.model_graph import ModelGraph
from llmc.graph.pointwise import POINTWISE
from llmc.graph.refusal import Refused
from llmc.passes.example import Example
from llmc.passes.node_rules import Call, Rule, rule_pass
from llmc.passes.rewrite import Numerics
from llmc.passes.shapes import dim_of, fake_of, same_shape, same_size, shape_of
from llmc.passes.uses import DATA_MOVEMENT

aten = torch.ops.aten


def _rules(graph: ModelGraph) -> dict[Any, Rule]:
    positions = next(n for n in graph.inputs() if n.name == "positions")
    value = positions.meta["val"]
    source = positions if value.dim() == 1 else Call(aten.squeeze.dim, (positions, 0))
    tokens = value.shape[-1]
    weights = frozenset(n.name for n in graph.weight_nodes())
    return {
        **dict.fromkeys(_ARANGES, partial(_counted, source, tokens)),
        **dict.fromkeys(_FILLED, partial(_filled, positions)),
        aten.slice.Tensor: partial(_first_rows, source, tokens, weights),
        aten.cumsum.default: partial(_unpadded, positions),
    }


def _counted(positions: fx.Node | Call, tokens: Any, node: fx.Node) -> fx.Node | Call | None:
    value, arguments = fake_of(node), call_arguments(node)
    if not same_size(value.shape[0], tokens):
        return None
    start, step = arguments.get("start", 0), arguments.get("step", 1)
    if start != 0 or step != 1:
        raise Refused(f"positions count from {start} in steps of {step}, expected from 0 in steps of 1", node)
    strange = _strange_use(node)
    if strange is not None:
        raise Refused(f"{strange.name} ({strange.target}) uses arange(T) for something else than positions", node)
    if value.dtype is torch.int64:
        return positions
    return Call(aten._to_copy.default, (positions,), {"dtype": value.dtype})


def _strange_use(node: fx.Node) -> fx.Node | None:
    for user in node.users:
        if user.target in DATA_MOVEMENT:
            strange = _strange_use(user)
            if strange is not None:
                return strange
        elif user.target not in _USES:
            return user
    return None


def _first_rows(positions: fx.Node | Call, tokens: Any, weights: frozenset[str], node: fx.Node) -> Call | None:
    """The first T rows of a table of weights."""
    arguments, value = call_arguments(node), fake_of(node)
    table = arguments["self"]
    if table.name not in weights or value.dim() != 2 or arguments["dim"] != 0 or arguments["step"] != 1:
        return None
    # A square table with a second slice by T is a mask, which the attention passes match as a whole.
    slices = [user for user in node.users if user.target is aten.slice.Tensor]
    is_mask = any(any(isinstance(size, SymInt) for size in shape_of(part)[1:]) for part in slices)
    if arguments["start"] or not same_size(value.shape[0], tokens) or is_mask:
        return None
    return Call(aten.embedding.default, (table, positions))


def _filled(positions: fx.Node, node: fx.Node) -> Call | None:
    """Replace a constant row, such as token types, by a value per token, or per channel of each token."""
    value, tokens = fake_of(node), fake_of(positions)
    channels = value.shape[tokens.dim() :]
    if not same_shape(value.shape[: tokens.dim()], tokens.shape) or any(isinstance(n, SymInt) for n in channels):
        return None
    number = _FILLED[node.target]
    filling = call_arguments(node)["fill_value"] if number is None else number
    filled = Call(aten.full_like.default, (positions, filling), {"dtype": value.dtype})
    for _ in channels:
        filled = Call(aten.unsqueeze.default, (filled, -1))
    return Call(aten.expand.default, (filled, [*[-1] * tokens.dim(), *channels])) if channels else filled


def _unpadded(positions: fx.Node, node: fx.Node) -> Call | None:
    """Replace the number of tokens up to each one, without padding."""
    value, counted = fake_of(node), call_arguments(node)["self"]
    while counted.target is aten._to_copy.default:
        counted = counted.args[0]
    if counted.target is not aten.ne.Scalar or dim_of(node) != value.dim() - 1:
        return None
    if counted.args[0].name != "input_ids":
        return None
    count = Call(aten.add.Tensor, (positions, 1))
    return count if value.dtype is torch.int64 else Call(aten._to_copy.default, (count,), {"dtype": value.dtype})


# None: the number that the call says.
_FILLED: dict[Any, int | None] = {
    **dict.fromkeys((aten.zeros.default, aten.new_zeros.default, aten.zeros_like.default), 0),
    **dict.fromkeys((aten.ones.default, aten.new_ones.default, aten.ones_like.default), 1),
    **dict.fromkeys((aten.full.default, aten.new_full.default), None),
}
_ARANGES = (aten.arange.default, aten.arange.start, aten.arange.start_step)
_USES = POINTWISE.keys() | {aten.embedding.default, aten.matmul.default}


def _of_tokens(x: Any, table: Any, positions: Any, input_ids: Any) -> tuple[Any, ...]:
    tokens = aten.sym_size.int(x, 0)
    counted = aten.unsqueeze.default(aten.arange.default(tokens, dtype=torch.float32, device="cpu"), 1)
    unpadded = aten.cumsum.default(aten.ne.Scalar(input_ids, 0), 0)
    filled = aten.full.default([tokens, 2], 0.5, dtype=torch.float32, device="cpu")
    by_row = aten.add.Tensor(x, aten.slice.Tensor(table, 0, 0, tokens)), aten.mul.Tensor(x, counted)
    return *by_row, aten.mul.Tensor(filled, aten.unsqueeze.default(unpadded, 1))


_TENSORS = {"x": ("T", 2), "table": (5, 2), "positions": torch.tensor([0, 1, 2]), "input_ids": torch.tensor([7, 5, 7])}
positions_input = rule_pass(
    "positions_input", _rules, Numerics.EXACT, Example(_of_tokens, _TENSORS, frozenset({"table"}))
)
