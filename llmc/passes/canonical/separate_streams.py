"""Split stacked residual streams: an op on a stack becomes the same op on each of its parts.

    op(stack([a, b], d), y), of pointwise ops     →  stack([op(a, y[0]), op(b, y[1])], d)
    matmul(stack([a, b], -1), y)                  →  stack([a·y[0, 0] + b·y[1, 0], …], -1)
    op(expand(x, [2, …]), y), of pointwise ops    →  op(stack([x[0], x[0]], 0), y)
    mean(stack([a, b], d), [d])                   →  (a + b) · 1/2
    mean(x, [1]), x [T, 2, …]                     →  (x[:, 0] + x[:, 1]) · 1/2
    matmul(y, x), y [T, 2, 2], x [T, 2, …]        →  stack([x[:, 0]·y[:, 0, 0] + x[:, 1]·y[:, 0, 1], …], 1)
    SDPA(q, x, y), x and y [T, 2, …], no mask     →  matmul(softmax(sum(q·x, -1)·scale), y)
    slice_scatter(stack([a, b, c], d), x, d, 1)   →  stack([a, x[0], x[1]], d)
    transpose(stack(…)), slice(stack(…), d)       →  stack of the parts, along the corresponding axis
    select(stack([a, b], d), d, 1)                →  b
Must have: no more than eight streams. AltUp (Gemma 3n) and hyper-connections are written so.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from llmc.graph.call_arguments import call_arguments
from llmc.graph.model_graph import ModelGraph
from llmc.graph.pointwise import POINTWISE
from llmc.passes.example import Example
from llmc.passes.node_rules import Call, Rule, permuted, rule_pass
from llmc.passes.rewrite import Numerics
from llmc.passes.shapes import dim_of, fake_of, front_dim, is_one, same_shape, shape_of, tensor_of

aten = torch.ops.aten

# A product with more streams than this is left to kernels.
_MOST_STREAMS = 8


@dataclass(frozen=True)
class Streams:
    """A stack: its parts and the axis that they lie along."""

    parts: tuple[fx.Node, ...]
    dim: int

    def stacked(self, parts: Sequence[Any], dim: int | None = None) -> Call:
        """A stack of other parts."""
        return Call(aten.stack.default, (list(parts), self.dim if dim is None else dim))


def _rules(graph: ModelGraph) -> dict[Any, Rule]:
    return {
        **dict.fromkeys(POINTWISE, _pointwise),
        aten.expand.default: _spread,
        aten.matmul.default: _matmul,
        aten.mean.dim: partial(_reduced, is_mean=True),
        aten.scaled_dot_product_attention.default: _attention,
        aten.select.int: _select,
        aten.slice.Tensor: _slice,
        aten.slice_scatter.default: _written,
        aten.sum.dim_IntList: partial(_reduced, is_mean=False),
        aten.transpose.int: _transpose,
        aten.unsqueeze.default: _unsqueeze,
    }


def _streams(node: Any) -> Streams | None:
    if not isinstance(node, fx.Node) or node.target is not aten.stack.default:
        return None
    parts = tuple(call_arguments(node)["tensors"])
    return Streams(parts, dim_of(node)) if len(parts) <= _MOST_STREAMS else None


def _pointwise(node: fx.Node) -> Call | None:
    value = fake_of(node)
    known = [streams for streams in map(_streams, node.args) if streams is not None]
    if not known or any(_dim_in(known[0], value) != _dim_in(streams, value) for streams in known):
        return None
    count, dim = len(known[0].parts), _dim_in(known[0], value)
    if value.shape[dim] != count:
        return None
    parts = [
        Call(node.target, tuple(_part_of(a, value.dim(), dim, i) for a in node.args), dict(node.kwargs))
        for i in range(count)
    ]
    return known[0].stacked(parts, dim)


def _dim_in(streams: Streams, value: torch.Tensor) -> int:
    """The stack's axis in a result, whose axes are counted from the last."""
    rank: int = streams.parts[0].meta["val"].dim() + 1
    return value.dim() - (rank - streams.dim)


def _part_of(argument: Any, rank: int, dim: int, index: int) -> Any:
    """The part of an operand that belongs to one stream."""
    streams, value = _streams(argument), tensor_of(argument)
    if streams is not None:
        return streams.parts[index]
    if value is None:
        return argument
    own = dim - (rank - value.dim())
    if own < 0:
        return argument
    return Call(aten.squeeze.dim, (argument, own)) if is_one(value.shape[own]) else _selected(argument, own, index)


def _selected(node: fx.Node, dim: int, index: int) -> fx.Node | Call:
    """node[…, index, …], taken before axes were moved and added."""
    axes: list[int | None] = list(range(node.meta["val"].dim()))
    while node.target in (aten.transpose.int, aten.unsqueeze.default) and isinstance(node.args[0], fx.Node):
        if node.target is aten.transpose.int:
            first, second = _swapped(node)
            axes = [second if d == first else first if d == second else d for d in axes]
        else:
            new = dim_of(node)
            axes = [None if d is None or d == new else d - (d > new) for d in axes]
        node = node.args[0]
    taken = axes.pop(dim)
    assert taken is not None
    order = [d - (d > taken) for d in axes if d is not None]
    result = permuted(Call(aten.select.int, (node, taken, index)), order)
    for place, axis in enumerate(axes):
        if axis is None:
            result = Call(aten.unsqueeze.default, (result, place))
    return result


def _select(node: fx.Node) -> fx.Node | Call | None:
    streams = _streams(node.args[0])
    if streams is None:
        return None
    dim, index = dim_of(node), int(call_arguments(node)["index"])
    if dim == streams.dim:
        return streams.parts[index]
    inner, left = (dim, streams.dim - 1) if dim < streams.dim else (dim - 1, streams.dim)
    return streams.stacked([Call(aten.select.int, (part, inner, index)) for part in streams.parts], left)


def _slice(node: fx.Node) -> Call | None:
    streams, dim = _streams(node.args[0]), dim_of(node)
    return None if streams is None or dim != streams.dim else streams.stacked(streams.parts[_range(node)])


def _written(node: fx.Node) -> Call | None:
    streams = _streams(node.args[0])
    if streams is None or dim_of(node) != streams.dim:
        return None
    parts: list[Any] = list(streams.parts)
    source = call_arguments(node)["src"]
    rank = node.meta["val"].dim()
    for at, index in enumerate(range(*_range(node).indices(len(parts)))):
        parts[index] = _part_of(source, rank, streams.dim, at)
    return streams.stacked(parts)


def _range(node: fx.Node) -> slice:
    arguments = call_arguments(node)
    return slice(arguments["start"], arguments["end"], arguments["step"])


def _transpose(node: fx.Node) -> Call | None:
    streams = _streams(node.args[0])
    if streams is None:
        return None
    rank = node.meta["val"].dim()
    order = list(range(rank))
    first, second = _swapped(node)
    order[first], order[second] = order[second], order[first]
    # The axes of a part, in the order of the stack, without the stack's own.
    before = [d for d in range(rank) if d != streams.dim]
    after = [d for d in order if d != streams.dim]
    return streams.stacked(
        [_permuted(p, [before.index(d) for d in after]) for p in streams.parts], order.index(streams.dim)
    )


def _swapped(node: fx.Node) -> tuple[int, int]:
    """The axes that a transposition swaps."""
    return dim_of(node, "dim0"), dim_of(node, "dim1")


def _permuted(node: fx.Node, order: list[int]) -> fx.Node | Call:
    """Permute the axes by as few transpositions as possible, counting those that already make the node."""
    while node.target is aten.transpose.int and isinstance(node.args[0], fx.Node):
        first, second = _swapped(node)
        order = [second if d == first else first if d == second else d for d in order]
        node = node.args[0]
    return permuted(node, order)


def _unsqueeze(node: fx.Node) -> Call | None:
    streams = _streams(node.args[0])
    if streams is None:
        return None
    dim = dim_of(node)
    inner, left = (dim, streams.dim + 1) if dim <= streams.dim else (dim - 1, streams.dim)
    return streams.stacked([Call(aten.unsqueeze.default, (part, inner)) for part in streams.parts], left)


def _matmul(node: fx.Node) -> Call | None:
    """Streams mixed by a small matrix per token, on either side."""
    left, right = node.args[:2]
    streams, mixing, value = _streams(left), tensor_of(right), node.meta["val"]
    if streams is not None and mixing is not None and streams.dim == value.dim() - 1 and mixing.dim() == value.dim():
        if not _is_few(value.shape[-1]):
            return None
        return streams.stacked([_mixed(streams.parts, right, -1, column) for column in range(value.shape[-1])])
    mixing = tensor_of(left)
    if mixing is None or mixing.dim() != value.dim() or not (_is_few(mixing.shape[-1]) and _is_row(mixing.shape[-2])):
        return None
    parts = _beside(right, value.dim() - 2)
    if parts is None:
        return None
    mixed = [_mixed(parts, left, -2, row) for row in range(mixing.shape[-2])]
    return Call(aten.stack.default, (mixed, value.dim() - 2))


def _is_few(count: Any) -> bool:
    return _is_row(count) and count > 1


def _is_row(count: Any) -> bool:
    return not isinstance(count, torch.SymInt) and count <= _MOST_STREAMS


def _attention(node: fx.Node) -> Call | None:
    """The attention of each token over its own streams."""
    arguments = call_arguments(node)
    q, keys = arguments["query"], fake_of(arguments["key"])
    if arguments["attn_mask"] is not None or arguments["is_causal"] or not _is_few(keys.shape[-2]):
        return None
    if not any(isinstance(size, torch.SymInt) for size in keys.shape[:-2]) or not _is_row(node.meta["val"].shape[-2]):
        return None
    if q.target is aten.expand.default and q.args[0].meta["val"].shape[-2:] == q.meta["val"].shape[-2:]:
        q = q.args[0]  # The same queries for every token, whose streams say how many there are.
    scale = keys.shape[-1] ** -0.5 if arguments["scale"] is None else arguments["scale"]
    pairs = Call(aten.unsqueeze.default, (q, -2)), Call(aten.unsqueeze.default, (arguments["key"], -3))
    scores = Call(aten.mul.Tensor, (Call(aten.sum.dim_IntList, (Call(aten.mul.Tensor, pairs), [-1])), scale))
    return Call(aten.matmul.default, (Call(aten.softmax.int, (scores, -1)), arguments["value"]))


def _mixed(parts: Sequence[fx.Node | Call], mixing: Any, dim: int, index: int) -> fx.Node | Call:
    """The sum of parts, each times one number of a row or a column of the matrix."""
    weights = Call(aten.select.int, (mixing, dim, index))
    products = [
        Call(aten.mul.Tensor, (part, Call(aten.unsqueeze.default, (Call(aten.select.int, (weights, -1, i)), -1))))
        for i, part in enumerate(parts)
    ]
    return _sum(products)


def _spread(node: fx.Node) -> Call | None:
    """Rewrite a value that is repeated on a new first axis, so that it is computed with a stack."""
    source = node.all_input_nodes[0]
    before, after = shape_of(source), shape_of(node)
    if len(before) != len(after) or any(user.target not in POINTWISE for user in node.users):
        return None
    if not _is_few(after[0]) or not is_one(before[0]) or not same_shape(before[1:], after[1:]):
        return None
    return Call(aten.stack.default, ([Call(aten.squeeze.dim, (source, 0))] * after[0], 0))


def _beside(node: Any, dim: int) -> list[fx.Node | Call] | None:
    """Streams that are adjacent in the channels of a token: parts of an axis before the last."""
    shape = shape_of(node)
    if dim == len(shape) - 1 or not _is_few(shape[dim]):
        return None
    if not any(isinstance(size, torch.SymInt) for size in shape[:dim]):
        return None
    return [Call(aten.select.int, (node, dim, i)) for i in range(shape[dim])]


def _reduced(node: fx.Node, *, is_mean: bool) -> fx.Node | Call | None:
    source, arguments = node.args[0], call_arguments(node)
    streams = _streams(source)
    if arguments["dtype"] is not None or len(arguments["dim"]) != 1:
        return None
    dim = front_dim(arguments["dim"][0], fake_of(source).dim())
    if streams is not None and streams.dim != dim:
        return None
    parts = _beside(source, dim) if streams is None else streams.parts
    if parts is None:
        return None
    total = _sum(parts)
    result = Call(aten.mul.Tensor, (total, 1.0 / len(parts))) if is_mean else total
    return Call(aten.unsqueeze.default, (result, dim)) if arguments["keepdim"] else result


def _sum(terms: Sequence[fx.Node | Call]) -> fx.Node | Call:
    total = terms[0]
    for term in terms[1:]:
        total = Call(aten.add.Tensor, (total, term))
    return total


def _altup(scores: Any, x: Any, mixing: Any) -> Any:
    streams = aten.stack.default([x, aten.mul.Tensor(x, scores)], 0)
    last = aten.transpose.int(aten.transpose.int(streams, 0, 1), 1, 2)
    mixed = aten.transpose.int(aten.transpose.int(aten.matmul.default(last, mixing), 1, 2), 0, 1)
    added = aten.add.Tensor(mixed, streams)
    changed = aten.slice_scatter.default(added, aten.mul.Tensor(aten.slice.Tensor(added, 0, 1, 2), 0.5), 0, 1, 2)
    again = aten.mul.Tensor(aten.expand.default(aten.unsqueeze.default(x, 0), [2, -1, -1]), changed)
    return aten.add.Tensor(aten.mean.dim(again, [0]), aten.select.int(again, 0, 1))


def _pooled(q: Any, x: Any, y: Any) -> tuple[Any, Any]:
    """The pooling attention of each token over its own streams, whose axis is the last but one."""
    attended = aten.scaled_dot_product_attention.default(
        q, aten.stack.default([x, y], 1), aten.stack.default([y, x], 1)
    )
    return attended, aten.unsqueeze.default(aten.stack.default([x, y], 1), 2)


separate_streams = rule_pass(
    "separate_streams",
    _rules,
    Numerics.REORDER,
    Example(_altup, {"scores": ("T", 1), "x": ("T", 4), "mixing": ("T", 2, 2)}),
    Example(_pooled, {"q": ("T", 1, 2), "x": ("T", 2), "y": ("T", 2)}),
)
