"""Replace a tensor that a model writes piece by piece by one concatenation.

    y = new_empty(…); y[..., :n] = a; y[..., n:] = b  →  cat([a, b], -1), each part broadcast as it was when written
    repeat(x, [1, 2, 1])                               →  cat([x, x], 1), or expand where x has one
    copy(y, x)                                         →  x in y's dtype, expanded to y's shape
Must have: slices in steps of 1 along one axis of a known size, which cover it.
"""

from typing import Any

import torch
from torch import fx

from llmc.graph.call_arguments import call_arguments
from llmc.graph.model_graph import ModelGraph
from llmc.passes.example import Example
from llmc.passes.node_rules import Call, Rule, rule_pass
from llmc.passes.rewrite import Numerics
from llmc.passes.shapes import dim_of, fake_of, is_one, same_shape, shape_of

aten = torch.ops.aten


def _rules(graph: ModelGraph) -> dict[Any, Rule]:
    return {
        aten.copy.default: _copied,
        aten.repeat.default: _repeated,
        aten.slice_scatter.default: _written,
    }


def _written(node: fx.Node) -> Call | None:
    """The last of the slices that are written into a tensor, with those before it."""
    dim = dim_of(node)
    size: Any = node.meta["val"].shape[dim]
    if isinstance(size, torch.SymInt):
        return None
    parts: dict[tuple[int, int], Any] = {}
    current: Any = node
    while isinstance(current, fx.Node) and current.target is aten.slice_scatter.default:
        arguments = call_arguments(current)
        start, end, _ = slice(arguments["start"], arguments["end"]).indices(size)
        if dim_of(current) != dim or arguments["step"] != 1:
            return None
        if not isinstance(arguments["src"], fx.Node) or arguments["src"].meta["val"].shape[dim] != end - start:
            return None
        parts.setdefault((start, end), arguments["src"])
        current = arguments["self"]
    spans = sorted(parts)
    covered = [0, *(end for _, end in spans)] == [*(start for start, _ in spans), size]
    return Call(aten.cat.default, ([parts[span] for span in spans], dim)) if covered else None


def _copied(node: fx.Node) -> Call | fx.Node | None:
    result: fx.Node | Call = call_arguments(node)["src"]
    into, value = fake_of(node), fake_of(result)
    if value.dtype is not into.dtype:
        result = Call(aten._to_copy.default, (result,), {"dtype": into.dtype})
    if not same_shape(value.shape, into.shape):
        if value.dim() != into.dim():
            return None
        pairs: Any = zip(value.shape, into.shape, strict=True)
        sizes = [-1 if same_shape([a], [b]) or isinstance(b, torch.SymInt) else b for a, b in pairs]
        result = Call(aten.expand.default, (result, sizes))
    return result


def _repeated(node: fx.Node) -> Call | fx.Node | None:
    arguments = call_arguments(node)
    result: fx.Node | Call = arguments["self"]
    shape = shape_of(result)
    added = len(arguments["repeats"]) - len(shape)
    pairs = list(zip([1] * added + list(shape), arguments["repeats"], strict=True))
    if any(not isinstance(n, int) or n < 1 or (n > 1 and isinstance(size, torch.SymInt)) for size, n in pairs):
        return None
    for _ in range(added):
        result = Call(aten.unsqueeze.default, (result, 0))
    spread = [count if is_one(size) and count > 1 else -1 for size, count in pairs]
    if any(count > 1 for count in spread):
        result = Call(aten.expand.default, (result, spread))
    for dim, (size, count) in enumerate(pairs):
        if count > 1 and not is_one(size):
            result = Call(aten.cat.default, ([result] * count, dim))
    return result


def _joined(x: Any, y: Any, whole: Any) -> tuple[Any, ...]:
    written = aten.slice_scatter.default(aten.slice_scatter.default(whole, x, 1, 0, 2), y, 1, 2, 4)
    return written, aten.repeat.default(x, [1, 2]), aten.copy.default(whole, aten.slice.Tensor(x, 1, 0, 1))


_TENSORS = {"x": ("T", 2), "y": ("T", 2), "whole": ("T", 4)}
join_parts = rule_pass("join_parts", _rules, Numerics.EXACT, Example(_joined, _TENSORS))
