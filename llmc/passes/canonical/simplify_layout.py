"""Move transposes of the first two axes towards the outputs, where they meet their inverses and vanish.

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
from llmc.graph.stage import Stage
from llmc.options import BuildOptions
from llmc.passes.example import Example
from llmc.passes.node_rules import Call, Rule, apply_rules
from llmc.passes.rewrite import GraphPass, Numerics
from llmc.passes.rewrite_log import RewriteLog
from llmc.passes.shapes import front_dim, is_one, same_shape, same_value, sizes_with_inferred, tensor_of

aten = torch.ops.aten


def _run(graph: ModelGraph, options: BuildOptions, log: RewriteLog) -> None:
    apply_rules(graph, _rules(), log)


def _untransposed(value: Any) -> fx.Node | None:
    """x of transpose(x, 0, 1), of three axes or more, or of [tokens, channels]."""
    if not isinstance(value, fx.Node) or value.target is not aten.transpose.int:
        return None
    tensor = tensor_of(value)
    source = value.args[0]
    if tensor is None or not isinstance(source, fx.Node) or _dims(value) != [0, 1]:
        return None
    return source if tensor.dim() > 2 or isinstance(source.meta["val"].shape[0], torch.SymInt) else None


def _transposed(call: Call | fx.Node) -> Call:
    return Call(aten.transpose.int, (call, 0, 1))


def _transpose(node: fx.Node) -> Call | fx.Node | None:
    inner = node.args[0]
    if not isinstance(inner, fx.Node):
        return None
    if _is_unsqueeze(inner) and _dims(node) == [0, 1]:
        return _transposed_unsqueeze(inner)
    if inner.target is aten._to_copy.default and _is_unsqueeze(inner.args[0]) and _dims(node) == [0, 1]:
        before = _transposed_unsqueeze(inner.args[0])
        return None if before is None else Call(aten._to_copy.default, (before,), dict(inner.kwargs))
    if inner.target is not aten.transpose.int:
        return None
    source = inner.args[0]
    if _dims(node) == _dims(inner):
        return source if isinstance(source, fx.Node) else None
    is_behind = _untransposed(inner) is not None and _dims(node)[0] > 1
    return _transposed(Call(aten.transpose.int, (source, *_dims(node)))) if is_behind else None


def _is_unsqueeze(value: Any) -> TypeGuard[fx.Node]:
    return isinstance(value, fx.Node) and value.target is aten.unsqueeze.default


def _transposed_unsqueeze(inner: fx.Node) -> Call | None:
    source, value = inner.args[0], inner.meta["val"]
    axis = front_dim(call_arguments(inner)["dim"], value.dim())
    if axis == 0:
        return Call(aten.unsqueeze.default, (source, 1))
    if axis == 1:
        return None
    return Call(aten.unsqueeze.default, (Call(aten.transpose.int, (source, 0, 1)), axis))


def _dims(transpose: fx.Node) -> list[int]:
    """The two axes that a transpose swaps, from the front, in order."""
    arguments = call_arguments(transpose)
    return sorted(front_dim(arguments[name], transpose.meta["val"].dim()) for name in ("dim0", "dim1"))


def _over_last_axis(node: fx.Node) -> Call | None:
    """Norms, products with a weight: only the first argument has the transposed axes, or one of size 1 in between."""
    first, *rest = node.args
    source = _untransposed(first)
    if tensor_of(node) is None or not isinstance(first, fx.Node) or _rows_of(node) != [first]:
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
    value = tensor_of(node)
    if value is None or not any(_untransposed(a) is not None for a in node.args):
        return None
    args: list[Any] = []
    each: Any
    for each in node.args:
        argument, tensor = each, tensor_of(each)
        source = _untransposed(argument)
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
    source = node.args[0] if node.target is aten.unsqueeze.default and node.args[1] == 2 else None
    return isinstance(source, fx.Node) and source.target is aten.transpose.int and source.meta["val"].dim() == 2


def _slice(node: fx.Node) -> Call | None:
    source, value = _untransposed(node.args[0]), tensor_of(node)
    if source is None or value is None:
        return None
    dim = front_dim(call_arguments(node)["dim"], value.dim())
    return _transposed(Call(aten.slice.Tensor, (source, {0: 1, 1: 0}.get(dim, dim), *node.args[2:])))


def _cat(node: fx.Node) -> Call | None:
    tensors: Any = node.args[0]
    value = tensor_of(node)
    sources = [_untransposed(t) for t in tensors]
    if value is None or None in sources:
        return None
    dim = front_dim(call_arguments(node)["dim"], value.dim())
    return _transposed(Call(aten.cat.default, (sources, {0: 1, 1: 0}.get(dim, dim))))


def _expand(node: fx.Node) -> Call | None:
    source, sizes = _untransposed(node.args[0]), list(call_arguments(node)["size"])
    if source is None or len(sizes) != source.meta["val"].dim():
        return None
    return _transposed(Call(aten.expand.default, (source, [sizes[1], sizes[0], *sizes[2:]])))


def _of_tokens(source: Any, node: fx.Node) -> Call | None:
    """unsqueeze(x, 0) of x [tokens, …]."""
    before, after = tensor_of(source), tensor_of(node)
    if before is None or after is None or before.dim() < 2:
        return None
    tokens: Any = before.shape[0]
    if not isinstance(tokens, torch.SymInt):
        return None
    is_added = is_one(after.shape[0]) and same_shape(after.shape[1:], before.shape)
    return _transposed(Call(aten.unsqueeze.default, (source, 1))) if is_added else None


def _reshape(node: fx.Node) -> Call | fx.Node | None:
    source, shape = node.args[:2]
    if not isinstance(source, fx.Node):
        return None
    if same_value(tensor_of(source), tensor_of(node)):
        return source
    if source.target in (aten.reshape.default, aten.unsqueeze.default):
        return Call(aten.reshape.default, (source.args[0], shape))
    inner = _untransposed(source)
    if inner is not None and (is_one(inner.meta["val"].shape[0]) or is_one(inner.meta["val"].shape[1])):
        return Call(aten.reshape.default, (inner, shape))
    return _of_tokens(source, node) or _of_later_axes(inner, source, node)


def _of_later_axes(inner: fx.Node | None, source: fx.Node, node: fx.Node) -> Call | None:
    """A reshape of what follows the two first axes, transposed ones or [1, tokens]."""
    before, after = tensor_of(source), tensor_of(node)
    if before is None or after is None or after.dim() < 3:
        return None
    if inner is not None and same_shape(after.shape[:2], before.shape[:2]):
        kept = inner, (*inner.meta["val"].shape[:2], *after.shape[2:])
    elif is_one(after.shape[0]) and same_shape(after.shape[1:2], before.shape[:1]):
        kept = source, (*before.shape[:1], 1, *after.shape[2:])
    else:
        return None
    sizes = sizes_with_inferred(kept[1])
    return None if sizes is None else _transposed(Call(aten.reshape.default, (kept[0], sizes)))


def _squeeze(node: fx.Node) -> fx.Node | None:
    return _inverse(node, aten.unsqueeze.default, 1)


def _select(node: fx.Node) -> fx.Node | None:
    return _inverse(node, aten.unsqueeze.default, 1)


def _unsqueeze(node: fx.Node) -> Call | fx.Node | None:
    return _inverse(node, aten.squeeze.dim, 0) or _of_tokens(node.args[0], node)


def _inverse(node: fx.Node, target: Any, more_axes: int) -> fx.Node | None:
    inner, value = node.args[0], tensor_of(node)
    if not isinstance(inner, fx.Node) or inner.target is not target or value is None:
        return None
    source = inner.args[0]
    axes = [front_dim(call_arguments(n)["dim"], value.dim() + more_axes) for n in (node, inner)]
    is_inverse = axes[0] == axes[1] and same_value(tensor_of(source), value)
    return source if is_inverse and isinstance(source, fx.Node) else None


def _cast(node: fx.Node) -> Call | fx.Node | None:
    inner = node.args[0]
    if isinstance(inner, fx.Node) and inner.target is aten._to_copy.default:
        source = inner.args[0]
        before, between, after = tensor_of(source), tensor_of(inner), tensor_of(node)
        if before is None or between is None or after is None or not isinstance(source, fx.Node):
            return None
        if between.dtype is torch.float32 and before.dtype is after.dtype and before.dtype.is_floating_point:
            return source
    return _pointwise(node)


_RULES: dict[Any, Rule] = {
    **dict.fromkeys(POINTWISE, _pointwise),
    aten._to_copy.default: _cast,
    aten.cat.default: _cat,
    aten.expand.default: _expand,
    aten.reshape.default: _reshape,
    aten.select.int: _select,
    aten.slice.Tensor: _slice,
    aten.squeeze.dim: _squeeze,
    aten.transpose.int: _transpose,
    aten.unsqueeze.default: _unsqueeze,
}


def _rules() -> dict[Any, Rule]:
    return {**_RULES, **{target: rule for target, record in RECORDS.items() if (rule := _rule_of(record)) is not None}}


def _rule_of(record: OpRecord) -> Rule | None:
    """Of an op that takes any axes in front: of one argument, or of all that it has rows of."""
    leading = () if record.axes is None else record.axes.leading
    if leading == ("x",):
        return _over_last_axis
    return _pointwise if leading and leading == record.rows else None


def _heads_first(x: Any, y: Any, weight: Any) -> tuple[Any, ...]:
    first, second = (aten.transpose.int(each, 0, 1) for each in (x, y))
    normed = torch.ops.llmc.rms_norm.default(aten.mul.Tensor(first, second), weight, 0.625)
    halves = aten.cat.default([aten.slice.Tensor(normed, -1, 2, 4), aten.exp.default(first)], 2)
    again = aten.reshape.default(aten.reshape.default(y, [-1, 8]), [-1, 4, 2])
    return aten.transpose.int(halves, 0, 1), aten.squeeze.dim(aten.unsqueeze.default(again, 1), 1)


def _products_of_heads(x: Any, y: Any, weight: Any) -> tuple[Any, ...]:
    first, second = (aten.transpose.int(each, 0, 1) for each in (x, y))
    gated = torch.ops.llmc.gated_activation.default(first, second, "silu")
    return torch.ops.llmc.head_linear.default(first, weight), aten.transpose.int(gated, 0, 1)


def _and_back(x: Any, y: Any) -> tuple[Any, ...]:
    copied = aten._to_copy.default(aten._to_copy.default(x, dtype=torch.float32), dtype=torch.float32)
    spread = aten.expand.default(aten.transpose.int(y, 0, 1), [2, -1, 3])
    taken = aten.select.int(aten.unsqueeze.default(x, 1), 1, 0)
    return copied, taken, aten.transpose.int(spread, 0, 1), aten.unsqueeze.default(aten.squeeze.dim(y, 1), 1)


simplify_layout = GraphPass(
    "simplify_layout",
    _run,
    Numerics.EXACT,
    Stage.CAPTURED,
    examples=(
        Example(_heads_first, {"x": ("T", 2, 4), "y": ("T", 2, 4), "weight": (4,)}),
        # The axes of a head's product cannot trade places.
        Example(_products_of_heads, {"x": (2, "T", 4), "y": (2, "T", 4), "weight": (2, 3, 4)}),
        Example(_and_back, {"x": ("T", 2), "y": ("T", 1, 3)}),
    ),
)
