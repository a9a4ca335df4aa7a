"""Repeat along a first axis after computing instead of before, so that equal values are computed once.

    op(repeat(x, 3), repeat(y, 3)), of pointwise ops      →  repeat(op(x, y), 3), and so for slices and unsqueeze
    select(repeat(x, 3), 0, i)                            →  x
    slice_scatter(x, slice(x, d, a, b, c), d, a, b, c)    →  x, and so for select_scatter
    select_scatter(repeat(x, 3), x, 0, i)                 →  repeat(x, 3)
where repeat(x, n) is expand(unsqueeze(x, 0), [n, …]).
Must have: other operands without that axis, or with one on it. Interleaved mrope overwrites some rotary angles with
those of other rows of positions, which are equal for text.
"""

from typing import Any

import torch
from torch import SymInt, fx

from llmc.graph.call_arguments import call_arguments
from llmc.graph.model_graph import ModelGraph
from llmc.graph.pointwise import POINTWISE
from llmc.passes.example import Example
from llmc.passes.node_rules import Call, Rule, rule_pass
from llmc.passes.rewrite import Numerics
from llmc.passes.shapes import dim_of, fake_of, front_dim, is_one, same_shape, shape_of, tensor_of

aten = torch.ops.aten


def _rules(graph: ModelGraph) -> dict[Any, Rule]:
    return {
        **dict.fromkeys(POINTWISE, _pointwise),
        **dict.fromkeys(_TAKEN, _written),
        aten.select.int: _select,
        aten.slice.Tensor: _slice,
        aten.unsqueeze.default: _unsqueeze,
    }


def _once(node: Any) -> fx.Node | Call | None:
    """x of expand(unsqueeze(x, 0), [n, …]), which repeats it along a new axis before all others."""
    if not isinstance(node, fx.Node) or node.target is not aten.expand.default:
        return None
    source = node.all_input_nodes[0]
    value, before = fake_of(node), fake_of(source)
    rows: Any = value.shape[0]
    if before.dim() != value.dim() or not is_one(before.shape[0]) or isinstance(rows, SymInt) or rows < 2:
        return None
    return _without_front(source) if same_shape(before.shape[1:], value.shape[1:]) else None


def _without_front(node: fx.Node) -> fx.Node | Call:
    is_added = node.target is aten.unsqueeze.default and node.args[1] == 0
    return node.all_input_nodes[0] if is_added else Call(aten.squeeze.dim, (node, 0))


def _repeated(x: fx.Node | Call, like: torch.Tensor) -> Call:
    return Call(aten.expand.default, (Call(aten.unsqueeze.default, (x, 0)), [like.shape[0], *[-1] * (like.dim() - 1)]))


def _pointwise(node: fx.Node) -> Call | None:
    value = fake_of(node)
    if value.dim() == 0:
        return None
    along = [a for a in node.all_input_nodes if (t := tensor_of(a)) is not None and t.dim() == value.dim()]
    once = {a: x for a in along if (x := _once(a)) is not None}
    ones = {a: _without_front(a) for a in along if is_one(a.meta["val"].shape[0])}
    if not once or len(once | ones) < len(along):
        return None
    args = tuple((once | ones).get(a, a) if isinstance(a, fx.Node) else a for a in node.args)
    return _repeated(Call(node.target, args, dict(node.kwargs)), value)


def _slice(node: fx.Node) -> Call | None:
    x, value, dim = _once(node.args[0]), fake_of(node), dim_of(node)
    if x is None:
        return None
    if dim > 0:
        ends = tuple(call_arguments(node)[name] for name in ("start", "end", "step"))
        return _repeated(Call(aten.slice.Tensor, (x, dim - 1, *ends)), value)
    return Call(aten.unsqueeze.default, (x, 0)) if is_one(value.shape[0]) else _repeated(x, value)


def _unsqueeze(node: fx.Node) -> Call | None:
    x, dim = _once(node.args[0]), dim_of(node)
    return _repeated(Call(aten.unsqueeze.default, (x, dim - 1)), fake_of(node)) if x is not None and dim > 0 else None


def _select(node: fx.Node) -> fx.Node | Call | None:
    x, dim = _once(node.args[0]), dim_of(node)
    if x is None or dim == 0:
        return x
    return _repeated(Call(aten.select.int, (x, dim - 1, call_arguments(node)["index"])), node.meta["val"])


def _written(node: fx.Node) -> fx.Node | None:
    """The tensor, if a part of itself is written to its own place."""
    into, part = (call_arguments(node)[name] for name in ("self", "src"))
    x, place = _once(into), _place(node)
    if x is not None and place[0] == 0 and node.target is aten.select_scatter.default:
        return into if _is_same(part, x) else None
    is_taken = part.target is _TAKEN[node.target] and _is_same(part.args[0], into)
    return into if is_taken and place[1] is not None and _place(part) == place else None


def _is_same(first: fx.Node | Call, second: fx.Node | Call) -> bool:
    """Whether both are one node, or one view of it."""
    if first is second:
        return True
    is_view = first.target is second.target and first.target in _VIEWS and first.args[1:] == second.args[1:]
    sources = first.args[:1] + second.args[:1]
    return is_view and all(isinstance(source, fx.Node) for source in sources) and _is_same(*sources)


def _place(node: fx.Node) -> tuple[int, range | int | None]:
    """The axis of a part, and which of it, if that is known."""
    arguments, dim = call_arguments(node), dim_of(node)
    size: Any = shape_of(arguments["self"])[dim]
    bounds = [arguments[name] for name in ("index", "start", "end", "step") if name in arguments]
    if isinstance(size, SymInt) or any(isinstance(bound, fx.Node) for bound in bounds):
        return dim, None
    return dim, front_dim(bounds[0], size) if len(bounds) == 1 else range(size)[slice(*bounds)]


_TAKEN: dict[Any, Any] = {aten.select_scatter.default: aten.select.int, aten.slice_scatter.default: aten.slice.Tensor}
_VIEWS = frozenset({aten.select.int, aten.slice.Tensor, aten.squeeze.dim})


def _interleaved(positions: Any, frequencies: Any) -> tuple[Any, ...]:
    rows = aten.unsqueeze.default(aten.expand.default(aten.unsqueeze.default(positions, 0), [3, -1]), 2)
    angles = aten.cos.default(aten.mul.Tensor(rows, frequencies))
    first, third = (aten.select.int(angles, 0, row) for row in (0, 2))
    written = aten.slice_scatter.default(first, aten.slice.Tensor(third, 1, 2, 4, 3), 1, 2, 99, 3)
    again = aten.select.int(aten.select_scatter.default(angles, written, 0, 0), 0, 0)
    return again, aten.slice.Tensor(angles, 2, 1, 3), aten.slice.Tensor(angles, 0, 1, 3)


_TENSORS = {"positions": ("T",), "frequencies": (4,)}
repeat_last = rule_pass("repeat_last", _rules, Numerics.EXACT, Example(_interleaved, _TENSORS))
