"""Rewrite the ops of routers on each token's scores to one form.

    topk(x, k)  →  top_k(x, k)
    gather(x, -1, index)  →  take_channels(x, index)
    scatter(x, -1, index, value)  →  where(mark_channels(index), value, x)
    scatter(x, -1, index, values), both of a topk of y  →  where(mark_channels(index), y, x)
    softmax(x, -1)  →  _softmax(x, -1), a loop over the channels
Must have: the last axis, and the largest of it; scores [tokens, channels], or in a fixed number of groups for topk and
softmax. A softmax over tokens belongs to an attention.
"""

import operator
from typing import Any

import torch
from torch import fx

from llmc.graph.call_arguments import call_arguments
from llmc.graph.model_graph import ModelGraph
from llmc.graph.refusal import Refused
from llmc.passes.example import Example
from llmc.passes.node_rules import Call, Rule, rule_pass
from llmc.passes.rewrite import Numerics
from llmc.passes.shapes import dim_of, fake_of, same_value

aten, llmc = torch.ops.aten, torch.ops.llmc


def _rules(graph: ModelGraph) -> dict[Any, Rule]:
    return {
        aten.softmax.int: _softmax,
        aten.topk.default: _top_k,
        aten.gather.default: _take,
        aten.scatter.src: _mark_taken,
        aten.scatter.value: _mark,
    }


def _along_last(node: fx.Node) -> bool:
    return dim_of(node) == fake_of(node.args[0]).dim() - 1


def _check_axis(node: fx.Node) -> None:
    if not _along_last(node):
        raise Refused("it works on another axis than the last one", node)


def _top_k(node: fx.Node) -> Call:
    arguments = call_arguments(node)
    _check_axis(node)
    if not arguments["largest"]:
        raise Refused("it does not take the largest", node)
    return Call(llmc.top_k.default, (arguments["self"], arguments["k"]))


def _take(node: fx.Node) -> Call | None:
    arguments = call_arguments(node)
    _check_axis(node)
    if fake_of(arguments["index"]).dim() != 2:
        return None
    return Call(llmc.take_channels.default, (arguments["self"], arguments["index"]))


def _mark(node: fx.Node) -> Call | None:
    arguments, value = call_arguments(node), fake_of(node)
    _check_axis(node)
    if value.dim() != 2:
        return None
    marked = Call(llmc.mark_channels.default, (arguments["index"], value.shape[1]))
    filling = Call(aten.full.default, ([], arguments["value"]), {"dtype": value.dtype})
    return Call(aten.where.self, (marked, filling, arguments["self"]))


def _mark_taken(node: fx.Node) -> Call | None:
    """The largest channels of y in their places."""
    arguments = call_arguments(node)
    value, index, values = fake_of(node), arguments["index"], arguments["src"]
    _check_axis(node)
    if value.dim() != 2:
        return None
    pair = [n.args[0] for n in (values, index) if n.target is operator.getitem]
    if len(pair) != 2 or pair[0] is not pair[1] or (values.args[1], index.args[1]) != (0, 1):
        return None
    of_largest = pair[0].target in (aten.topk.default, llmc.top_k.default)
    if not of_largest or not same_value(fake_of(pair[0].args[0]), value):
        return None
    marked = Call(llmc.mark_channels.default, (index, value.shape[1]))
    return Call(aten.where.self, (marked, pair[0].args[0], arguments["self"]))


def _softmax(node: fx.Node) -> Call | None:
    arguments, value = call_arguments(node), fake_of(node)
    if not _along_last(node) or not isinstance(value.shape[-1], int):
        return None
    x, dtype = arguments["self"], arguments["dtype"]
    if dtype is not None and fake_of(x).dtype is not dtype:
        x = Call(aten._to_copy.default, (x,), {"dtype": dtype})
    return Call(aten._softmax.default, (x, value.dim() - 1, False))


def _weighed(x: Any, index: Any) -> tuple[Any, ...]:
    marked = aten.scatter.value(x, -1, index, 2)
    return aten.softmax.int(aten.gather.default(x, -1, index), -1), marked


_TENSORS = {"x": ("T", 4), "index": torch.tensor([[2, 0], [1, 1], [3, 2]])}
normalize_routing = rule_pass("normalize_routing", _rules, Numerics.EXACT, Example(_weighed, _TENSORS))
