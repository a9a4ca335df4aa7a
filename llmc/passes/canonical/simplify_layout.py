"""Move transposes of the first two axes towards the outputs, where they cancel with their inverses.

    transpose(transpose(x, 0, 1), 0, 1)  →  x
    op(transpose(x, 0, 1))               →  transpose(op(x), 0, 1), for ops over the last axis and pointwise ones
    reshape, transpose of later axes of it  →  the same
    unsqueeze(x, 0) of tokens, reshape(x, [1, …]) of them  →  transpose(unsqueeze(x, 1), 0, 1), and so back, also of a
                                            cast of it
    reshape(reshape(x, …), shape)        →  reshape(x, shape), also of unsqueeze;  unsqueeze and squeeze  →  nothing
    select(unsqueeze(x, i), i, 0)        →  x
    cast(cast(x, float32), x.dtype)      →  x
Must have: for several arguments, each of them transposed or broadcast along neither axis.
"""

from typing import Any, TypeGuard

import torch
from torch import fx

from llmc.graph.call_arguments import call_arguments
from llmc.graph.model_graph import ModelGraph
from llmc.graph.op_record import RECORDS, OpRecord, record_of
from llmc.graph.pointwise import POINTWISE
from llmc.passes.example import Example
from llmc.passes.node_rules import Call, Rule, reshaped, rule_pass
from llmc.passes.rewrite import Numerics
from llmc.passes.shapes import dim_of, fake_of, is_one, same_shape, same_value, shape_of, tensor_of

aten = torch.ops.aten


def _rules(graph: ModelGraph) -> dict[Any, Rule]:
    by_record = {target: rule for target, record in RECORDS.items() if (rule := _rule_of(record)) is not None}
    return {
        **dict.fromkeys(POINTWISE, _pointwise),
        aten._to_copy.default: _cast,
        aten.cat.default: _cat,
        aten.expand.default: _expand,
        aten.reshape.default: _reshape,
        aten.select.int: _of_unsqueeze,
        aten.slice.Tensor: _slice,
        aten.squeeze.dim: _of_unsqueeze,
        aten.transpose.int: _transpose,
        aten.unsqueeze.default: _unsqueeze,
        **by_record,
    }


def _rule_of(record: OpRecord) -> Rule | None:
    """The rule for an op that accepts any leading axes, of one argument or of all its row arguments."""
    leading = () if record.axes is None else record.axes.leading
    if leading == ("x",):
        return _over_last_axis
    return _pointwise if leading and leading == record.rows else None


def _untransposed(value: Any) -> fx.Node | None:
    """x of transpose(x, 0, 1), of three axes or more, or of [tokens, channels]."""
    if not isinstance(value, fx.Node) or value.target is not aten.transpose.int or _dims(value) != [0, 1]:
        return None
    source = value.all_input_nodes[0]
    shape = shape_of(source)
    return source if len(shape) > 2 or isinstance(shape[0], torch.SymInt) else None


def _transposed(call: Call | fx.Node) -> Call:
    return Call(aten.transpose.int, (call, 0, 1))


def _transpose(node: fx.Node) -> Call | fx.Node | None:
    inner = node.all_input_nodes[0]
    if _is_unsqueeze(inner) and _dims(node) == [0, 1]:
        return _transposed_unsqueeze(inner)
    if inner.target is aten._to_copy.default and _is_unsqueeze(inner.args[0]) and _dims(node) == [0, 1]:
        before = _transposed_unsqueeze(inner.args[0])
        return None if before is None else Call(aten._to_copy.default, (before,), dict(inner.kwargs))
    if inner.target is not aten.transpose.int:
        return None
    source = inner.all_input_nodes[0]
    if _dims(node) == _dims(inner):
        return source
    is_behind = _untransposed(inner) is not None and _dims(node)[0] > 1
    return _transposed(Call(aten.transpose.int, (source, *_dims(node)))) if is_behind else None


def _is_unsqueeze(value: Any) -> TypeGuard[fx.Node]:
    return isinstance(value, fx.Node) and value.target is aten.unsqueeze.default


def _transposed_unsqueeze(inner: fx.Node) -> Call | None:
    source, axis = inner.args[0], dim_of(inner)
    if axis == 0:
        return Call(aten.unsqueeze.default, (source, 1))
    if axis == 1:
        return None
    return Call(aten.unsqueeze.default, (Call(aten.transpose.int, (source, 0, 1)), axis))


def _dims(transpose: fx.Node) -> list[int]:
    """The two axes that a transpose swaps, from the front, in order."""
    return sorted(dim_of(transpose, name) for name in ("dim0", "dim1"))


def _over_last_axis(node: fx.Node) -> Call | None:
    """Norms, products with a weight: only the first argument has the transposed axes, or one of size 1 in between."""
    first, rest = node.all_input_nodes[0], node.args[1:]
    source = _untransposed(first)
    if _rows_of(node) != [first]:
        return None
    if source is not None and source.meta["val"].dim() > 2:
        return _transposed(Call(node.target, (source, *rest), dict(node.kwargs)))
    if first.meta["val"].dim() != 3 or not is_one(first.meta["val"].shape[1]):
        return None
    is_added = first.target is aten.unsqueeze.default and first.args[1] == 1
    record = record_of(node)
    if not is_added and (record is None or "x" not in record.takes):  # a norm may be of one head, which stays one
        return None
    row = first.args[0] if is_added else Call(aten.squeeze.dim, (first, 1))
    return Call(aten.unsqueeze.default, (Call(node.target, (row, *rest), dict(node.kwargs)), 1))


def _rows_of(node: fx.Node) -> list[fx.Node]:
    """The tensors that a call has a row of for each row of its result."""
    record, arguments = record_of(node), call_arguments(node)
    rows = () if record is None else record.rows
    return [arguments[name] for name in rows if isinstance(arguments[name], fx.Node)]


def _pointwise(node: fx.Node) -> Call | None:
    if not any(_untransposed(a) is not None for a in node.args):
        return None
    value, args = fake_of(node), list[Any]()
    argument: Any
    for argument in node.args:
        tensor, source = tensor_of(argument), _untransposed(argument)
        if source is not None and tensor is not None and tensor.dim() == value.dim():
            args.append(source)
        elif tensor is None or tensor.dim() < value.dim() - 1:
            args.append(argument)
        elif tensor.dim() == value.dim() and _may_be_transposed(argument, tensor):
            args.append(_transposed(argument))
        else:
            return None
    return _transposed(Call(node.target, tuple(args), dict(node.kwargs)))


def _may_be_transposed(node: fx.Node, tensor: torch.Tensor) -> bool:
    """Whether that moves no data: one of the axes is 1, or it undoes the transpose of unsqueeze(transpose(x), 2)."""
    if is_one(tensor.shape[0]) or is_one(tensor.shape[1]):
        return True
    if node.target is not aten.unsqueeze.default or node.args[1] != 2:
        return False
    source = node.all_input_nodes[0]
    return source.target is aten.transpose.int and fake_of(source).dim() == 2


def _slice(node: fx.Node) -> Call | None:
    source, dim = _untransposed(node.args[0]), dim_of(node)
    if source is None:
        return None
    return _transposed(Call(aten.slice.Tensor, (source, {0: 1, 1: 0}.get(dim, dim), *node.args[2:])))


def _cat(node: fx.Node) -> Call | None:
    sources, dim = [_untransposed(t) for t in call_arguments(node)["tensors"]], dim_of(node)
    if None in sources:
        return None
    return _transposed(Call(aten.cat.default, (sources, {0: 1, 1: 0}.get(dim, dim))))


def _expand(node: fx.Node) -> Call | None:
    source, sizes = _untransposed(node.args[0]), list(call_arguments(node)["size"])
    if source is None or len(sizes) != source.meta["val"].dim():
        return None
    return _transposed(Call(aten.expand.default, (source, [sizes[1], sizes[0], *sizes[2:]])))


def _of_tokens(source: Any, node: fx.Node) -> Call | None:
    """unsqueeze(x, 0) of x [tokens, …]."""
    before, after = shape_of(source), shape_of(node)
    if len(before) < 2 or not isinstance(before[0], torch.SymInt):
        return None
    is_added = is_one(after[0]) and same_shape(after[1:], before)
    return _transposed(Call(aten.unsqueeze.default, (source, 1))) if is_added else None


def _reshape(node: fx.Node) -> Call | fx.Node | None:
    source, shape = node.all_input_nodes[0], node.args[1]
    if same_value(fake_of(source), fake_of(node)):
        return source
    if source.target in (aten.reshape.default, aten.unsqueeze.default):
        return Call(aten.reshape.default, (source.args[0], shape))
    inner = _untransposed(source)
    if inner is not None and (is_one(inner.meta["val"].shape[0]) or is_one(inner.meta["val"].shape[1])):
        return Call(aten.reshape.default, (inner, shape))
    return _of_tokens(source, node) or _of_later_axes(inner, source, node)


def _of_later_axes(inner: fx.Node | None, source: fx.Node, node: fx.Node) -> Call | None:
    """A reshape of the axes after the first two, which are transposed or [1, tokens]."""
    before, after = shape_of(source), shape_of(node)
    if len(after) < 3:
        return None
    if inner is not None and same_shape(after[:2], before[:2]):
        apart = reshaped(inner, (*shape_of(inner)[:2], *after[2:]))
    elif is_one(after[0]) and same_shape(after[1:2], before[:1]):
        apart = reshaped(source, (*before[:1], 1, *after[2:]))
    else:
        return None
    return None if apart is None else _transposed(apart)


def _of_unsqueeze(node: fx.Node) -> fx.Node | None:
    return _inverse(node, aten.unsqueeze.default)


def _unsqueeze(node: fx.Node) -> Call | fx.Node | None:
    return _inverse(node, aten.squeeze.dim) or _of_tokens(node.args[0], node)


def _inverse(node: fx.Node, target: Any) -> fx.Node | None:
    inner = node.all_input_nodes[0]
    if inner.target is not target or dim_of(inner) != dim_of(node):
        return None
    source = inner.all_input_nodes[0]
    return source if same_value(fake_of(source), fake_of(node)) else None


def _cast(node: fx.Node) -> Call | fx.Node | None:
    inner = node.all_input_nodes[0]
    if inner.target is aten._to_copy.default:
        source = inner.all_input_nodes[0]
        before, between, after = (fake_of(value).dtype for value in (source, inner, node))
        if between is torch.float32 and before is after and before.is_floating_point:
            return source
    return _pointwise(node)


def _heads_first(x: Any, y: Any, weight: Any) -> tuple[Any, ...]:
    first, second = (aten.transpose.int(value, 0, 1) for value in (x, y))
    normed = torch.ops.llmc.rms_norm.default(aten.mul.Tensor(first, second), weight, 0.625)
    halves = aten.cat.default([aten.slice.Tensor(normed, -1, 2, 4), aten.exp.default(first)], 2)
    again = aten.reshape.default(aten.reshape.default(y, [-1, 8]), [-1, 4, 2])
    return aten.transpose.int(halves, 0, 1), aten.squeeze.dim(aten.unsqueeze.default(again, 1), 1)


def _products_of_heads(x: Any, y: Any, weight: Any) -> tuple[Any, ...]:
    first, second = (aten.transpose.int(value, 0, 1) for value in (x, y))
    gated = torch.ops.llmc.gated_activation.default(first, second, "silu")
    return torch.ops.llmc.head_linear.default(first, weight), aten.transpose.int(gated, 0, 1)


def _and_back(x: Any, y: Any) -> tuple[Any, ...]:
    copied = aten._to_copy.default(aten._to_copy.default(x, dtype=torch.float32), dtype=torch.float32)
    spread = aten.expand.default(aten.transpose.int(y, 0, 1), [2, -1, 3])
    taken = aten.select.int(aten.unsqueeze.default(x, 1), 1, 0)
    return copied, taken, aten.transpose.int(spread, 0, 1), aten.unsqueeze.default(aten.squeeze.dim(y, 1), 1)


simplify_layout = rule_pass(
    "simplify_layout",
    _rules,
    Numerics.EXACT,
    Example(_heads_first, {"x": ("T", 2, 4), "y": ("T", 2, 4), "weight": (4,)}),
    # The axes of a head's product cannot trade places.
    Example(_products_of_heads, {"x": (2, "T", 4), "y": (2, "T", 4), "weight": (2, 3, 4)}),
    Example(_and_back, {"x": ("T", 2), "y": ("T", 1, 3)}),
)
