"""Keep repeats of all tokens, which a model puts one run after the other, apart on their own axis.

    repeat(x, [n, 1])                            →  merged(transpose(expand(unsqueeze(x, 1), [-1, n, -1]), 0, 1))
    op(merged(x), merged(y)), of pointwise ops   →  merged(op(x, y))
    reshape(merged(x), [n, T, …])                →  x
where merged(x) is reshape(x [n, T, …], [n·T, …]).
Must have: the same number of runs in all of them. Afterwards the token axis is not merged with any other.
"""

from functools import partial
from typing import Any

import torch
from torch import SymInt, fx

from llmc.graph.call_arguments import call_arguments
from llmc.graph.model_graph import ModelGraph
from llmc.graph.pointwise import POINTWISE
from llmc.graph.propagate import token_count
from llmc.passes.canonical.separate_heads import pointwise_apart
from llmc.passes.example import Example
from llmc.passes.node_rules import Call, Rule, reshaped, rule_pass
from llmc.passes.rewrite import Numerics
from llmc.passes.shapes import fake_of, is_one, same_shape, same_size, same_value, shape_of

aten = torch.ops.aten


def _rules(graph: ModelGraph) -> dict[Any, Rule]:
    tokens = token_count(graph)
    return {
        **dict.fromkeys(POINTWISE, partial(_pointwise, tokens)),
        aten.repeat.default: partial(_repeat, tokens),
        aten.reshape.default: _reshape,
    }


def _repeat(tokens: SymInt, node: fx.Node) -> Call | None:
    source, (runs, *others) = node.args[0], call_arguments(node)["repeats"]
    shape = shape_of(source)
    if len(shape) != len(others) + 1 or not isinstance(runs, int) or runs < 2:
        return None
    if not same_size(shape[0], tokens) or any(n != 1 for n in others):
        return None
    spread = Call(aten.expand.default, (Call(aten.unsqueeze.default, (source, 1)), [-1, runs, *[-1] * len(others)]))
    return reshaped(Call(aten.transpose.int, (spread, 0, 1)), shape_of(node))


def _pointwise(tokens: SymInt, node: fx.Node) -> Call | None:
    shape = shape_of(node)
    return None if len(shape) < 2 or same_size(shape[0], tokens) else pointwise_apart(_apart, node)


def _apart(node: Any) -> tuple[fx.Node | Call, int] | None:
    """(x, n) of reshape(x [n, T, …], [n·T, …]), with an axis of size 1 after them if only the result has one."""
    if not isinstance(node, fx.Node) or node.target is not aten.reshape.default:
        return None
    source = node.all_input_nodes[0]
    before, after = shape_of(source), shape_of(node)
    if len(before) < 2 or isinstance(before[0], SymInt) or not same_size(before[0] * before[1], after[0]):
        return None
    if same_shape(before[2:], after[1:]):
        return source, before[0]
    if len(before) == 2 and len(after) == 2 and is_one(after[1]):
        return Call(aten.unsqueeze.default, (source, 2)), before[0]
    return None


def _reshape(node: fx.Node) -> fx.Node | None:
    apart = _apart(node.args[0])
    if apart is None or not isinstance(apart[0], fx.Node):
        return None
    return apart[0] if same_value(fake_of(apart[0]), fake_of(node)) else None


def _every_expert(scores: Any, x: Any) -> Any:
    by_expert = aten.reshape.default(scores, [-1, 1])
    return aten.reshape.default(aten.mul.Tensor(aten.repeat.default(x, [3, 1]), by_expert), [3, -1, 4])


_TENSORS = {"scores": (3, "T"), "x": ("T", 4)}
separate_repeats = rule_pass("separate_repeats", _rules, Numerics.EXACT, Example(_every_expert, _TENSORS))
