"""Rewrite each operation to one form, so that later patterns need only one.

    view, _unsafe_view, flatten, unflatten  →  reshape, with -1 for the token axis, so that no shape arithmetic remains
    one that only adds or drops axes of size 1, whatever the others are  →  unsqueeze, squeeze
    an element of split, chunk, unbind  →  slice or select of the source
    t, mT  →  transpose;  permute  →  transposes
    mm, bmm  →  matmul;  addmm, x·W, W·xᵀ, linear(x, Wᵀ)  →  linear(x, transpose(W));  baddbmm  →  add of a matmul
    min and max of two tensors, clamp between tensors  →  minimum, maximum;  __and__, __or__  →  bitwise_and, bitwise_or
    composite ops, such as logsumexp  →  these (in_simpler_ones.py)
    square  →  pow(x, 2);  std  →  square root of the mean of squares;  multiply  →  mul;  rsub  →  sub
    linalg_vector_norm of 1 or 2  →  sum of absolutes, or square root of the sum of squares
    var.dim  →  var.correction;  masked_fill, where with a scalar  →  where;  _softmax  →  softmax
    add(expand(x), y)  →  add(x, y), and so for all pointwise ops, where y has the whole shape
    native_layer_norm, fused SDPA variants, with only the first result used  →  layer_norm, SDPA
Must have: one symbolic size per reshape; otherwise the reshape keeps its shape arithmetic.
"""

import operator
from functools import partial
from typing import Any

import torch
from torch import SymInt, fx

from llmc.graph.call_arguments import call_arguments
from llmc.graph.model_graph import ModelGraph
from llmc.graph.pointwise import POINTWISE
from llmc.passes.canonical.in_simpler_ones import IN_SIMPLER_ONES
from llmc.passes.example import Example
from llmc.passes.node_rules import Call, Rule, permuted, rule_pass
from llmc.passes.rewrite import Numerics
from llmc.passes.shapes import (
    dim_of,
    fake_of,
    front_dim,
    is_one,
    same_shape,
    same_value,
    shape_of,
    sizes_with_inferred,
    tensor_of,
)
from llmc.passes.uses import is_weight

aten = torch.ops.aten


def _rules(graph: ModelGraph) -> dict[Any, Rule]:
    return _RULES | {aten.matmul.default: partial(_matmul, graph)}


def _reshape(node: fx.Node) -> Call | None:
    sizes = sizes_with_inferred(shape_of(node))
    if sizes is None:
        return _without_ones(node)
    is_done = node.target is aten.reshape.default and list(call_arguments(node)["shape"]) == sizes
    return None if is_done else Call(aten.reshape.default, (node.args[0], sizes))


def _without_ones(node: fx.Node) -> Call | None:
    """Several sizes are symbolic, so only axes of size 1 change: remove them and insert them at their new places."""
    value: Any = node.args[0]
    before, after = fake_of(value), fake_of(node)
    if not same_shape(_long(before), _long(after)):
        return None
    for dim in reversed(range(before.dim())):
        if is_one(before.shape[dim]):
            value = Call(aten.squeeze.dim, (value, dim))
    for dim in range(after.dim()):
        if is_one(after.shape[dim]):
            value = Call(aten.unsqueeze.default, (value, dim))
    return value if isinstance(value, Call) else None


def _long(value: torch.Tensor) -> list[Any]:
    """The sizes that are not 1."""
    return [size for size in value.shape if not is_one(size)]


def _part(node: fx.Node) -> fx.Node | Call | None:
    source, index = node.args
    if not isinstance(source, fx.Node) or not isinstance(index, int):
        return None
    if source.target is aten.broadcast_tensors.default:
        part: fx.Node = call_arguments(source)["tensors"][index]
        return part if same_value(tensor_of(part), tensor_of(node)) else None
    if source.target in _SPLITS:
        return _split_part(source, index)
    arguments = call_arguments(source) if source.op == "call_function" else {}
    if source.target is aten.native_layer_norm.default and index == 0:
        norm_names = ("input", "normalized_shape", "weight", "bias", "eps")
        return Call(aten.layer_norm.default, tuple(arguments[n] for n in norm_names))
    if source.target in _FUSED_ATTENTIONS and index == 0:
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        bound = {"attn_mask": arguments.get("attn_bias"), **arguments}
        positional = tuple(bound[n] for n in names)
        return Call(aten.scaled_dot_product_attention.default, positional, {"scale": bound["scale"]})
    return None


def _split_part(source: fx.Node, index: int) -> Call | None:
    arguments = call_arguments(source)
    parts, dim = source.meta["val"], dim_of(source)
    index = front_dim(index, len(parts))
    if source.target is aten.unbind.int:
        return Call(aten.select.int, (arguments["self"], dim, index))
    sizes = [p.shape[dim] for p in parts]
    if any(isinstance(s, SymInt) for s in sizes):
        return None
    return Call(aten.slice.Tensor, (arguments["self"], dim, sum(sizes[:index]), sum(sizes[: index + 1])))


def _swap_last(node: fx.Node) -> Call | None:
    rank = fake_of(node).dim()
    return None if rank < 2 else Call(aten.transpose.int, (node.args[0], rank - 2, rank - 1))


def _transpose(node: fx.Node) -> Call | None:
    names = ("dim0", "dim1")
    dims, given = sorted(dim_of(node, name) for name in names), [call_arguments(node)[name] for name in names]
    return None if dims == given else Call(aten.transpose.int, (node.args[0], *dims))


def _permute(node: fx.Node) -> Call | None:
    arguments = call_arguments(node)
    value = permuted(arguments["self"], [d % len(arguments["dims"]) for d in arguments["dims"]])
    return value if isinstance(value, Call) else None


def _slice(node: fx.Node) -> Call | None:
    """Dims from the front, the end of a fixed axis as its size."""
    arguments, dim = call_arguments(node), dim_of(node)
    size: Any = shape_of(node.args[0])[dim]
    start, end = arguments["start"], arguments["end"]
    if isinstance(size, SymInt) or isinstance(start, fx.Node) or isinstance(end, fx.Node):
        return None
    start, end, _ = slice(start, end).indices(size)
    step = (arguments["step"],) if arguments["step"] != 1 else ()
    wanted = (node.args[0], dim, start, end, *step)
    return None if node.args == wanted and not node.kwargs else Call(aten.slice.Tensor, wanted)


def _unsqueeze(node: fx.Node) -> Call | None:
    is_done = call_arguments(node)["dim"] >= 0
    return None if is_done else Call(aten.unsqueeze.default, (node.args[0], dim_of(node)))


def _addmm(node: fx.Node) -> Call | None:
    arguments = call_arguments(node)
    if arguments["beta"] != 1 or arguments["alpha"] != 1 or fake_of(arguments["self"]).dim() != 1:
        return None
    weight = Call(aten.transpose.int, (arguments["mat2"], 0, 1))
    return Call(aten.linear.default, (arguments["mat1"], weight, arguments["self"]))


def _matmul(graph: ModelGraph, node: fx.Node) -> Call | None:
    """x·W with a matrix of weights is linear, and so is W·xᵀ."""
    x, other = node.args
    if fake_of(other).dim() > 1 and fake_of(x).dim() == 2 and is_weight(x, graph):
        product = Call(aten.linear.default, (Call(aten.transpose.int, (other, -2, -1)), x))
        return Call(aten.transpose.int, (product, -2, -1))
    if fake_of(other).dim() != 2 or not is_weight(other, graph):
        return None
    return Call(aten.linear.default, (x, Call(aten.transpose.int, (other, 0, 1))))


def _linear(node: fx.Node) -> Call | None:
    """linear(x, transpose(transpose(W))), as x·Wᵀ leaves it."""
    x, weight, *rest = node.args
    inner = weight.args[0] if isinstance(weight, fx.Node) and weight.target is aten.transpose.int else None
    if isinstance(inner, fx.Node) and inner.target is aten.transpose.int:
        return Call(aten.linear.default, (x, inner.args[0], *rest))
    return None


def _renamed(target: Any) -> Rule:
    return lambda node: Call(target, tuple(node.args))


def _concat(node: fx.Node) -> Call:
    arguments = call_arguments(node)
    return Call(aten.cat.default, (arguments["tensors"], arguments["dim"]))


def _var(node: fx.Node) -> Call:
    arguments = call_arguments(node)
    keywords = {"correction": int(arguments["unbiased"]), "keepdim": arguments["keepdim"]}
    return Call(aten.var.correction, (arguments["self"], arguments["dim"]), keywords)


def _masked_fill(node: fx.Node) -> Call | None:
    source, mask, filling = node.args
    if isinstance(filling, fx.Node):
        return None
    return Call(aten.where.self, (mask, _scalar(filling, fake_of(node).dtype), source))


def _where_scalar(node: fx.Node) -> Call:
    condition, *sides = node.args
    tensors = [s if isinstance(s, fx.Node) else _scalar(s, fake_of(node).dtype) for s in sides]
    return Call(aten.where.self, (condition, *tensors))


def _scalar(value: Any, dtype: torch.dtype) -> Call:
    return Call(aten.full.default, ([], value), {"dtype": dtype})


def _softmax(node: fx.Node) -> Call | None:
    arguments = call_arguments(node)
    return None if arguments["half_to_float"] else Call(aten.softmax.int, (arguments["self"], arguments["dim"]))


def _squeeze_last(node: fx.Node) -> Call | None:
    """squeeze of several dims, one at a time."""
    value, dims = (call_arguments(node)[name] for name in ("self", "dim"))
    source = fake_of(value)
    for dim in sorted((front_dim(d, source.dim()) for d in dims), reverse=True):
        if is_one(source.shape[dim]):
            value = Call(aten.squeeze.dim, (value, dim))
    return value if isinstance(value, Call) else None


def _broadcast(node: fx.Node) -> Call | None:
    """A pointwise op expands its operands by itself."""
    shape = shape_of(node)
    whole = [a for a in node.args if (t := tensor_of(a)) is not None and same_shape(t.shape, shape)]
    expanded = [a for a in whole if isinstance(a, fx.Node) and a.target is aten.expand.default]
    if not expanded or len(expanded) == len(whole):
        return None
    args = tuple(a.args[0] if isinstance(a, fx.Node) and a in expanded else a for a in node.args)
    return Call(node.target, args, dict(node.kwargs))


def _to_tensor_overload(target: Any) -> Rule:
    def rule(node: fx.Node) -> Call | None:
        arguments = call_arguments(node)
        return Call(target, (arguments["self"], arguments["other"])) if arguments.get("alpha", 1) == 1 else None

    return rule


_SPLITS = frozenset(
    {aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default, aten.unbind.int, aten.tensor_split.sections}
)
_FUSED_ATTENTIONS = frozenset({aten._scaled_dot_product_flash_attention_for_cpu.default})
_RULES: dict[Any, Rule] = {
    **dict.fromkeys(POINTWISE, _broadcast),
    **IN_SIMPLER_ONES,
    operator.getitem: _part,
    aten._softmax.default: _softmax,
    aten._unsafe_view.default: _reshape,
    aten.__and__.Tensor: _renamed(aten.bitwise_and.Tensor),
    aten.__or__.Tensor: _renamed(aten.bitwise_or.Tensor),
    aten.add.Scalar: _to_tensor_overload(aten.add.Tensor),
    aten.addmm.default: _addmm,
    **dict.fromkeys((aten.bmm.default, aten.mm.default), _renamed(aten.matmul.default)),
    **dict.fromkeys((aten.concat.default, aten.concatenate.default), _concat),
    aten.div.Scalar: _to_tensor_overload(aten.div.Tensor),
    aten.flatten.using_ints: _reshape,
    aten.linear.default: _linear,
    aten.mT.default: _swap_last,
    aten.masked_fill.Scalar: _masked_fill,
    aten.max.other: _renamed(aten.maximum.default),
    aten.min.other: _renamed(aten.minimum.default),
    aten.mul.Scalar: _to_tensor_overload(aten.mul.Tensor),
    aten.multiply.Tensor: _renamed(aten.mul.Tensor),
    aten.permute.default: _permute,
    aten.reshape.default: _reshape,
    aten.slice.Tensor: _slice,
    aten.squeeze.dims: _squeeze_last,
    aten.sub.Scalar: _to_tensor_overload(aten.sub.Tensor),
    aten.t.default: _swap_last,
    aten.transpose.int: _transpose,
    aten.unflatten.int: _reshape,
    aten.unsqueeze.default: _unsqueeze,
    aten.var.dim: _var,
    aten.view.default: _reshape,
    aten.where.ScalarOther: _where_scalar,
    aten.where.ScalarSelf: _where_scalar,
    aten.where.Scalar: _where_scalar,
}


def _spellings(x: Any, weight: Any, bias: Any) -> tuple[Any, ...]:
    products = aten.addmm.default(bias, x, aten.t.default(weight)), aten.mm.default(x, aten.mT.default(weight))
    halves = aten.split.Tensor(aten.rsub.Scalar(aten.square.default(x), 1), 2, -1)
    parts = aten.unbind.int(aten.unflatten.int(x, 1, [2, 2]), 1)
    swapped = aten.permute.default(aten.view.default(x, [-1, 2, 2]), [0, 2, 1])
    normed = aten.native_layer_norm.default(x, [4], None, None, 0.625)
    soft = aten._softmax.default(aten.add.Scalar(x, 2), -1, False)
    selected = operator.getitem(halves, 1), operator.getitem(parts, 0)
    return *products, *selected, swapped, operator.getitem(normed, 0), soft


def _more_spellings(x: Any, low: Any, high: Any) -> tuple[Any, ...]:
    turned = aten.transpose.int(aten.max.other(x, aten.multiply.Tensor(x, x)), -1, 0)
    spread = aten.mul.Tensor(aten.expand.default(aten.mean.dim(x, [1], True), [-1, 4]), x)
    ends = aten.concat.default([aten.slice.Tensor(x, -1, 1, 99), aten.unsqueeze.default(low, -1)], 1)
    mask = aten.gt.Scalar(x, 0)
    filled = aten.masked_fill.Scalar(x, mask, 2), aten.where.ScalarSelf(mask, 3, x)
    deviations = aten.std.dim(x, [1], False, True), aten.var.dim(x, [1], False, True)
    row = aten.squeeze.dims(aten.unsqueeze.default(aten.unsqueeze.default(low, 0), 2), [0, 2])
    return turned, spread, ends, *filled, *deviations, row, aten.clamp.Tensor(row, high, aten.add.Scalar(high, 1))


def _several_in_one(x: Any, y: Any, z: Any) -> tuple[Any, ...]:
    norms = aten.linalg_vector_norm.default(x, 2, [-1]), aten.linalg_vector_norm.default(x, 1, [-1], True)
    logs = aten.log_sigmoid.default(x), aten.logsumexp.default(x, [-1], True), aten.logsumexp.default(x, [-1])
    return *norms, *logs, aten.baddbmm.default(z, x, y, beta=2, alpha=3)


normalize_ops = rule_pass(
    "normalize_ops",
    _rules,
    Numerics.REORDER,
    Example(_spellings, {"x": ("T", 4), "weight": (3, 4), "bias": (3,)}, frozenset({"weight", "bias"})),
    Example(_more_spellings, {"x": ("T", 4), "low": ("T",), "high": ("T",)}),
    Example(_several_in_one, {"x": (2, "T", 2), "y": (2, 2, 3), "z": (2, 1, 3)}),
)
