"""Bring repeated rotary angles to the form that fuse_rope knows: repeated first, unsqueezed after.

    cat([x, y], -1)[…, :len(x)]                    →  x
    unsqueeze(x, d)[…, a:b], cast(x)[…, a:b]        →  the slice inside
    repeat_interleave(x, 2, -1)                    →  reshape(stack([x, x], -1))
    repeat_interleave(unsqueeze(x, d), 2, -1)       →  unsqueeze(repeat_interleave(x, 2, -1), d)
    stack([unsqueeze(x, 0)] · n, -1)                →  unsqueeze(stack([x] · n, -1), 0)
    reshape(unsqueeze(x, 0), [1, …])                →  unsqueeze(reshape(x, …), 0)
Must have: the last axis; a slice in steps of 1 whose ends are those of one part.
"""

from itertools import accumulate
from typing import Any

import torch
from torch import fx

from llmc.graph.call_arguments import call_arguments
from llmc.graph.model_graph import ModelGraph
from llmc.graph.stage import Stage
from llmc.options import BuildOptions
from llmc.passes.example import Example
from llmc.passes.node_rules import Call, Rule, apply_rules
from llmc.passes.rewrite import GraphPass, Numerics
from llmc.passes.rewrite_log import RewriteLog
from llmc.passes.shapes import front_dim, is_one, sizes_with_inferred, tensor_of

aten = torch.ops.aten


def _run(graph: ModelGraph, options: BuildOptions, log: RewriteLog) -> None:
    apply_rules(graph, _RULES, log)


def _slice(node: fx.Node) -> Call | fx.Node | None:
    arguments = call_arguments(node)
    source, value = arguments["self"], tensor_of(node)
    if value is None or front_dim(arguments["dim"], value.dim()) != value.dim() - 1 or arguments["step"] != 1:
        return None
    ends = (arguments["start"] or 0, arguments["end"])
    if source.target is aten.cat.default and front_dim(call_arguments(source)["dim"], value.dim()) == value.dim() - 1:
        return _part(source, ends)
    if source.target is aten.unsqueeze.default and source.args[1] != value.dim() - 1:
        inner = Call(aten.slice.Tensor, (source.args[0], value.dim() - 2, *ends))
        return Call(aten.unsqueeze.default, (inner, source.args[1]))
    if source.target is aten._to_copy.default:
        inner = Call(aten.slice.Tensor, (source.args[0], value.dim() - 1, *ends))
        return Call(aten._to_copy.default, (inner,), dict(source.kwargs))
    return None


def _part(cat: fx.Node, ends: tuple[Any, Any]) -> fx.Node | None:
    parts: Any = cat.args[0]
    stops = list(accumulate(int(p.meta["val"].shape[-1]) for p in parts))
    starts = [0, *stops[:-1]]
    return next((p for p, *own in zip(parts, starts, stops, strict=True) if tuple(own) == ends), None)


def _repeat(node: fx.Node) -> Call | None:
    arguments = call_arguments(node)
    source, value = arguments["self"], tensor_of(node)
    if value is None or arguments["dim"] is None or arguments["repeats"] != 2:
        return None
    last = value.dim() - 1
    if front_dim(arguments["dim"], value.dim()) != last:
        return None
    if source.target is aten.unsqueeze.default and source.args[1] != last:
        inner = Call(aten.repeat_interleave.self_int, (source.args[0], 2, last - 1))
        return Call(aten.unsqueeze.default, (inner, source.args[1]))
    sizes = sizes_with_inferred(value.shape)
    pairs = Call(aten.stack.default, ([source, source], last + 1))
    return None if sizes is None else Call(aten.reshape.default, (pairs, sizes))


def _stack(node: fx.Node) -> Call | None:
    parts: Any = node.args[0]
    rank = node.meta["val"].dim()
    sources = [_front_axis_of(part) for part in parts]
    if None in sources or front_dim(call_arguments(node)["dim"], rank) != rank - 1:
        return None
    return Call(aten.unsqueeze.default, (Call(aten.stack.default, (sources, rank - 2)), 0))


def _reshape(node: fx.Node) -> Call | None:
    source, value = _front_axis_of(node.args[0]), tensor_of(node)
    if source is None or value is None or value.dim() < 2 or not is_one(value.shape[0]):
        return None
    sizes = sizes_with_inferred(value.shape[1:])
    return None if sizes is None else Call(aten.unsqueeze.default, (Call(aten.reshape.default, (source, sizes)), 0))


def _front_axis_of(node: Any) -> fx.Node | None:
    """x of unsqueeze(x, 0)."""
    is_added = isinstance(node, fx.Node) and node.target is aten.unsqueeze.default and node.args[1] == 0
    source = node.args[0] if is_added else None
    return source if isinstance(source, fx.Node) else None


_RULES: dict[Any, Rule] = {
    aten.repeat_interleave.self_int: _repeat,
    aten.reshape.default: _reshape,
    aten.slice.Tensor: _slice,
    aten.stack.default: _stack,
}


def _repeated(x: Any, y: Any) -> tuple[Any, ...]:
    both = aten.unsqueeze.default(aten.cat.default([x, y], -1), 1)
    pairs = aten.repeat_interleave.self_int(aten.unsqueeze.default(x, 1), 2, -1)
    first = aten.unsqueeze.default(x, 0)
    stacked = aten.reshape.default(aten.stack.default([first, first], -1), [1, -1, 4])
    return aten.slice.Tensor(both, 2, 0, 2), aten.slice.Tensor(both, 2, 2, 5), pairs, stacked


simplify_repeats = GraphPass(
    "simplify_repeats",
    _run,
    Numerics.EXACT,
    Stage.CAPTURED,
    examples=(Example(_repeated, {"x": ("T", 2), "y": ("T", 3)}),),
)
