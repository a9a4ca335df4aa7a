"""Rewrite table lookups, and channel selections known at build time, to one form each.

    table[ids], index_select(table, 0, ids)                      →  embedding(table, ids)
    numbers[ids [T, n]], of one number a channel                 →  gather(numbers of every token, -1, ids)
    gather(table, 0, ids[:, None] repeated along the channels)    →  embedding(table, ids)
    a lookup in a table that holds one number everywhere          →  full_like(ids, number)
    x[:, :, [4, 5]], index_select(x, 2, [4, 5])                  →  a slice of x for each run of channels
    max(x, -1), argmax(x, -1)                                     →  topk(x, 1)
Must have: a table [rows, channels] that is known when the engine is built; indices that are known, along one axis.
"""

import operator
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx

from llmc.graph.call_arguments import call_arguments
from llmc.graph.model_graph import ModelGraph
from llmc.graph.weights import Constant
from llmc.passes.example import Example
from llmc.passes.node_rules import Call, Rule, rule_pass
from llmc.passes.rewrite import Numerics
from llmc.passes.shapes import dim_of, fake_of, front_dim, is_one, same_shape, same_size, shape_of
from llmc.passes.uses import is_weight

aten = torch.ops.aten


def _rules(graph: ModelGraph) -> dict[Any, Rule]:
    return {
        aten.index.Tensor: partial(_index, graph),
        aten.index_select.default: partial(_index_select, graph),
        aten.gather.default: partial(_gather, graph),
        aten.argmax.default: _argmax,
        operator.getitem: _largest,
    }


def _index(graph: ModelGraph, node: fx.Node) -> Call | None:
    arguments = call_arguments(node)
    used = [(dim, index) for dim, index in enumerate(arguments["indices"]) if index is not None]
    return _chosen(graph, arguments["self"], *used[0]) if len(used) == 1 else None


def _index_select(graph: ModelGraph, node: fx.Node) -> Call | None:
    arguments = call_arguments(node)
    return _chosen(graph, arguments["self"], dim_of(node), arguments["index"])


def _chosen(graph: ModelGraph, source: fx.Node, dim: int, index: fx.Node) -> Call | None:
    """x[..., index] along one axis."""
    value, ids = fake_of(source), fake_of(index)
    if ids.dtype not in (torch.int64, torch.int32):
        return None
    numbers = _numbers(index, graph)
    if numbers is not None and not isinstance(value.shape[dim], torch.SymInt) and numbers.dim() == 1:
        return _slices(source, dim, [front_dim(int(n), int(value.shape[dim])) for n in numbers])
    if dim == 0 and value.dim() == 2 and is_weight(source, graph):
        return Call(aten.embedding.default, (source, index))
    if dim == 0 and value.dim() == 1 and ids.dim() == 2 and is_weight(source, graph):
        nothing = Call(aten.full_like.default, (Call(aten.slice.Tensor, (index, 1, 0, 1)), 0), {"dtype": value.dtype})
        return Call(aten.gather.default, (Call(aten.add.Tensor, (nothing, source)), -1, index))
    return None


def _slices(source: fx.Node, dim: int, numbers: list[int]) -> Call:
    """The channels as slices of neighbours, joined in their order."""
    ends = [i + 1 for i, (a, b) in enumerate(pairwise(numbers)) if b != a + 1]
    starts = [0, *ends]
    parts = [
        Call(aten.slice.Tensor, (source, dim, numbers[first], numbers[last - 1] + 1))
        for first, last in zip(starts, [*ends, len(numbers)], strict=True)
    ]
    return parts[0] if len(parts) == 1 else Call(aten.cat.default, (parts, dim))


def _gather(graph: ModelGraph, node: fx.Node) -> Call | None:
    table, index = (call_arguments(node)[name] for name in ("self", "index"))
    if not is_weight(table, graph):
        return None
    numbers = _numbers(table, graph)
    if numbers is not None and numbers.numel() and bool((numbers == numbers.flatten()[0]).all()):
        return Call(aten.full_like.default, (index, numbers.flatten()[0].item()), {"dtype": fake_of(table).dtype})
    return _rows(table, index, dim_of(node))


def _rows(table: fx.Node, index: fx.Node, dim: int) -> Call | None:
    """gather of whole rows: its index is the same for all channels."""
    source, value, ids = _repeated_along_last(index), fake_of(table), fake_of(index)
    if source is None or dim != value.dim() - 2 or any(not is_one(size) for size in value.shape[:-2]):
        return None
    if not same_size(ids.shape[-1], value.shape[-1]):
        return None
    sizes = [int(size) for size in value.shape[-2:]]
    rows = Call(aten.reshape.default, (table, sizes)) if value.dim() > 2 else table
    return Call(aten.embedding.default, (rows, Call(aten.squeeze.dim, (source, ids.dim() - 1))))


def _repeated_along_last(index: fx.Node) -> fx.Node | None:
    """x of x.repeat(1, 1, n) or x.expand(-1, -1, n), with one column."""
    if index.target not in (aten.repeat.default, aten.expand.default):
        return None
    source: fx.Node = call_arguments(index)["self"]
    before, shape = fake_of(source), shape_of(index)
    return source if before.dim() and is_one(before.shape[-1]) and same_shape(before.shape[:-1], shape[:-1]) else None


def _largest(node: fx.Node) -> Call | None:
    """The values and indices of max over the last axis."""
    source, part = node.args
    return _of_topk(source, part) if isinstance(source, fx.Node) and source.target is aten.max.dim else None


def _argmax(node: fx.Node) -> Call | None:
    return _of_topk(node, 1)


def _of_topk(node: fx.Node, part: Any) -> Call | None:
    arguments = call_arguments(node)
    last = fake_of(arguments["self"]).dim() - 1
    if arguments["dim"] is None or dim_of(node) != last:
        return None
    largest = Call(operator.getitem, (Call(aten.topk.default, (arguments["self"], 1)), part))
    return largest if arguments["keepdim"] else Call(aten.squeeze.dim, (largest, last))


def _numbers(node: fx.Node, graph: ModelGraph) -> Tensor | None:
    """The values of a constant of the program."""
    while node.target in (aten.expand.default, aten.lift_fresh_copy.default, aten.clone.default):
        node = call_arguments(node)["self"]
    recipe = graph.weights.get(node.name)
    return recipe.value if isinstance(recipe, Constant) else None


def _looked_up(table: Any, ids: Any) -> tuple[Any, ...]:
    rows = aten.expand.default(aten.unsqueeze.default(ids, 1), [-1, 2])
    return (
        aten.index.Tensor(table, [ids]),
        aten.index_select.default(table, 0, ids),
        aten.gather.default(table, 0, rows),
    )


_TENSORS = {"table": (3, 2), "ids": torch.tensor([2, 0, 1])}
normalize_lookups = rule_pass(
    "normalize_lookups", _rules, Numerics.EXACT, Example(_looked_up, _TENSORS, frozenset({"table"}))
)
