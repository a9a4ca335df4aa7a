"""Give lookups in tables, and choices of channels that are known when the engine is built, one spelling.

    table[ids], index_select(table, 0, ids)                      →  embedding(table, ids)
    numbers[ids [T, n]], of one number a channel                 →  gather(numbers of every token, -1, ids)
    gather(table, 0, ids[:, None] repeated along the channels)    →  embedding(table, ids)
    a lookup in a table that holds one number everywhere          →  full_like(ids, number)
    x[:, :, [4, 5]], index_select(x, 2, [4, 5])                  →  a slice of x for each run of channels
    max(x, -1), argmax(x, -1)                                     →  topk(x, 1)
Must have: a table [rows, channels] that is known when the engine is built; indices that are known, along one axis.
"""

import operator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx

from llmc.graph.call_arguments import call_arguments
from llmc.graph.model_graph import ModelGraph
from llmc.graph.stage import Stage
from llmc.graph.weights import Constant
from llmc.options import BuildOptions
from llmc.passes.example import Example
from llmc.passes.node_rules import Call, Rule, apply_rules
from llmc.passes.rewrite import GraphPass, Numerics
from llmc.passes.rewrite_log import RewriteLog
from llmc.passes.shapes import front_dim, is_one, same_shape, same_size, tensor_of
from llmc.passes.uses import is_weight

aten = torch.ops.aten


def _run(graph: ModelGraph, options: BuildOptions, log: RewriteLog) -> None:
    rules: dict[Any, Rule] = {
        aten.index.Tensor: _index_rule(graph),
        aten.index_select.default: _index_select_rule(graph),
        aten.gather.default: _gather_rule(graph),
        aten.argmax.default: _argmax,
        operator.getitem: _largest,
    }
    apply_rules(graph, rules, log)


def _index_rule(graph: ModelGraph) -> Rule:
    def rule(node: fx.Node) -> Call | fx.Node | None:
        source, indices = node.args
        if not isinstance(source, fx.Node) or not isinstance(indices, list | tuple):
            return None
        used = [(dim, index) for dim, index in enumerate(indices) if isinstance(index, fx.Node)]
        return _chosen(source, *used[0], graph) if len(used) == 1 else None

    return rule


def _index_select_rule(graph: ModelGraph) -> Rule:
    def rule(node: fx.Node) -> Call | fx.Node | None:
        arguments = call_arguments(node)
        rank = arguments["self"].meta["val"].dim()
        return _chosen(arguments["self"], front_dim(arguments["dim"], rank), arguments["index"], graph)

    return rule


def _chosen(source: fx.Node, dim: int, index: fx.Node, graph: ModelGraph) -> Call | fx.Node | None:
    """x[..., index] along one axis."""
    value, ids = tensor_of(source), tensor_of(index)
    if value is None or ids is None or ids.dtype not in (torch.int64, torch.int32):
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


def _slices(source: fx.Node, dim: int, numbers: list[int]) -> Call | fx.Node:
    """The channels as slices of neighbours, joined in their order."""
    ends = [i + 1 for i, (a, b) in enumerate(pairwise(numbers)) if b != a + 1]
    starts = [0, *ends]
    parts = [
        Call(aten.slice.Tensor, (source, dim, numbers[first], numbers[last - 1] + 1))
        for first, last in zip(starts, [*ends, len(numbers)], strict=True)
    ]
    return parts[0] if len(parts) == 1 else Call(aten.cat.default, (parts, dim))


def _gather_rule(graph: ModelGraph) -> Rule:
    def rule(node: fx.Node) -> Call | None:
        arguments = call_arguments(node)
        table, index = arguments["self"], arguments["index"]
        value, ids = tensor_of(table), tensor_of(index)
        if value is None or ids is None or not is_weight(table, graph):
            return None
        numbers = _numbers(table, graph)
        if numbers is not None and numbers.numel() and bool((numbers == numbers.flatten()[0]).all()):
            return Call(aten.full_like.default, (index, numbers.flatten()[0].item()), {"dtype": value.dtype})
        return _rows(table, index, front_dim(arguments["dim"], value.dim()), value, ids)

    return rule


def _rows(table: fx.Node, index: fx.Node, dim: int, value: Tensor, ids: Tensor) -> Call | None:
    """gather of whole rows: its index is the same for all channels."""
    source = _repeated_along_last(index)
    if source is None or dim != value.dim() - 2 or any(not is_one(size) for size in value.shape[:-2]):
        return None
    if not same_size(ids.shape[-1], value.shape[-1]):
        return None
    sizes = [int(size) for size in value.shape[-2:]]
    rows = Call(aten.reshape.default, (table, sizes)) if value.dim() > 2 else table
    return Call(aten.embedding.default, (rows, Call(aten.squeeze.dim, (source, ids.dim() - 1))))


def _repeated_along_last(index: fx.Node) -> fx.Node | None:
    """x of x.repeat(1, 1, n) or x.expand(-1, -1, n), with one column."""
    value = tensor_of(index)
    if index.target not in (aten.repeat.default, aten.expand.default) or value is None:
        return None
    source = index.args[0]
    before = tensor_of(source)
    if before is None or before.dim() != value.dim() or not is_one(before.shape[-1]):
        return None
    same = same_shape(before.shape[:-1], value.shape[:-1])
    return source if same and isinstance(source, fx.Node) else None


def _largest(node: fx.Node) -> Call | None:
    """The values and indices of max over the last axis."""
    source, part = node.args
    if not isinstance(source, fx.Node) or source.target is not aten.max.dim:
        return None
    arguments = call_arguments(source)
    value, result = tensor_of(arguments["self"]), tensor_of(node)
    if value is None or result is None or front_dim(arguments["dim"], value.dim()) != value.dim() - 1:
        return None
    largest = Call(operator.getitem, (Call(aten.topk.default, (arguments["self"], 1)), part))
    return largest if arguments["keepdim"] else Call(aten.squeeze.dim, (largest, value.dim() - 1))


def _argmax(node: fx.Node) -> Call | None:
    arguments = call_arguments(node)
    value, dim = tensor_of(arguments["self"]), arguments["dim"]
    if value is None or dim is None or front_dim(dim, value.dim()) != value.dim() - 1:
        return None
    largest = Call(operator.getitem, (Call(aten.topk.default, (arguments["self"], 1)), 1))
    return largest if arguments["keepdim"] else Call(aten.squeeze.dim, (largest, value.dim() - 1))


def _numbers(node: fx.Node, graph: ModelGraph) -> Tensor | None:
    """The values of a constant of the program."""
    while node.target in (aten.expand.default, aten.lift_fresh_copy.default, aten.clone.default):
        of = node.args[0]
        if not isinstance(of, fx.Node):
            return None
        node = of
    recipe = graph.weights.get(node.name)
    return recipe.value if isinstance(recipe, Constant) else None


def _looked_up(table: Any, ids: Any) -> tuple[Any, ...]:
    rows = aten.expand.default(aten.unsqueeze.default(ids, 1), [-1, 2])
    return (
        aten.index.Tensor(table, [ids]),
        aten.index_select.default(table, 0, ids),
        aten.gather.default(table, 0, rows),
    )


normalize_lookups = GraphPass(
    "normalize_lookups",
    _run,
    Numerics.EXACT,
    Stage.CAPTURED,
    examples=(Example(_looked_up, {"table": (3, 2), "ids": torch.tensor([2, 0, 1])}, frozenset({"table"})),),
)
