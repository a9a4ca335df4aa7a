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
from llmc.passes.example import Example
from llmc.passes.node_rules import Call, Rule, reshaped, rule_pass
from llmc.passes.rewrite import Numerics
from llmc.passes.shapes import dim_of, fake_of, is_one, shape_of

aten = torch.ops.aten


def _rules(graph: ModelGraph) -> dict[Any, Rule]:
    return {
        aten.repeat_interleave.self_int: _repeat,
        aten.reshape.default: _reshape,
        aten.slice.Tensor: _slice,
        aten.stack.default: _stack,
    }


def _slice(node: fx.Node) -> Call | fx.Node | None:
    arguments = call_arguments(node)
    source, last = arguments["self"], fake_of(node).dim() - 1
    if dim_of(node) != last or arguments["step"] != 1:
        return None
    ends = (arguments["start"] or 0, arguments["end"])
    if source.target is aten.cat.default and dim_of(source) == last:
        return _part(source, ends)
    if source.target is aten.unsqueeze.default and source.args[1] != last:
        inner = Call(aten.slice.Tensor, (source.args[0], last - 1, *ends))
        return Call(aten.unsqueeze.default, (inner, source.args[1]))
    if source.target is aten._to_copy.default:
        inner = Call(aten.slice.Tensor, (source.args[0], last, *ends))
        return Call(aten._to_copy.default, (inner,), dict(source.kwargs))
    return None


def _part(cat: fx.Node, ends: tuple[Any, Any]) -> fx.Node | None:
    parts: Any = cat.args[0]
    stops = list(accumulate(int(p.meta["val"].shape[-1]) for p in parts))
    starts = [0, *stops[:-1]]
    return next((p for p, *own in zip(parts, starts, stops, strict=True) if tuple(own) == ends), None)


def _repeat(node: fx.Node) -> Call | None:
    arguments = call_arguments(node)
    source, last = arguments["self"], fake_of(node).dim() - 1
    if arguments["dim"] is None or arguments["repeats"] != 2 or dim_of(node) != last:
        return None
    if source.target is aten.unsqueeze.default and source.args[1] != last:
        inner = Call(aten.repeat_interleave.self_int, (source.args[0], 2, last - 1))
        return Call(aten.unsqueeze.default, (inner, source.args[1]))
    return reshaped(Call(aten.stack.default, ([source, source], last + 1)), shape_of(node))


def _stack(node: fx.Node) -> Call | None:
    last = fake_of(node).dim() - 1
    sources = [_front_axis_of(part) for part in call_arguments(node)["tensors"]]
    if None in sources or dim_of(node) != last:
        return None
    return Call(aten.unsqueeze.default, (Call(aten.stack.default, (sources, last - 1)), 0))


def _reshape(node: fx.Node) -> Call | None:
    source, shape = _front_axis_of(node.args[0]), shape_of(node)
    if source is None or len(shape) < 2 or not is_one(shape[0]):
        return None
    inner = reshaped(source, shape[1:])
    return None if inner is None else Call(aten.unsqueeze.default, (inner, 0))


def _front_axis_of(node: Any) -> fx.Node | None:
    """x of unsqueeze(x, 0)."""
    is_added = isinstance(node, fx.Node) and node.target is aten.unsqueeze.default and node.args[1] == 0
    return node.all_input_nodes[0] if is_added else None


def _repeated(x: Any, y: Any) -> tuple[Any, ...]:
    both = aten.unsqueeze.default(aten.cat.default([x, y], -1), 1)
    pairs = aten.repeat_interleave.self_int(aten.unsqueeze.default(x, 1), 2, -1)
    first = aten.unsqueeze.default(x, 0)
    stacked = aten.reshape.default(aten.stack.default([first, first], -1), [1, -1, 4])
    return aten.slice.Tensor(both, 2, 0, 2), aten.slice.Tensor(both, 2, 2, 5), pairs, stacked


simplify_repeats = rule_pass(
    "simplify_repeats", _rules, Numerics.EXACT, Example(_repeated, {"x": ("T", 2), "y": ("T", 3)})
)
