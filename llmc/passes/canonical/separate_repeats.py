"""Keep repeats of all tokens, which a model puts one run after the other, apart on an axis of their own.

    repeat(x, [n, 1])                            →  merged(transpose(expand(unsqueeze(x, 1), [-1, n, -1]), 0, 1))
    op(merged(x), merged(y)), of pointwise ops   →  merged(op(x, y))
    reshape(merged(x), [n, T, …])                →  x
where merged(x) is reshape(x [n, T, …], [n·T, …]).
Must have: as many runs of all of them. What is left has the tokens on an axis that no other is merged with.
"""

from typing import Any

import torch
from torch import SymInt, fx

from llmc.graph.call_arguments import call_arguments
from llmc.graph.model_graph import ModelGraph
from llmc.graph.pointwise import POINTWISE
from llmc.graph.propagate import token_count
from llmc.graph.stage import Stage
from llmc.options import BuildOptions
from llmc.passes.example import Example
from llmc.passes.node_rules import Call, Rule, apply_rules
from llmc.passes.rewrite import GraphPass, Numerics
from llmc.passes.rewrite_log import RewriteLog
from llmc.passes.shapes import is_one, same_shape, same_size, same_value, sizes_with_inferred, tensor_of

aten = torch.ops.aten


def _run(graph: ModelGraph, options: BuildOptions, log: RewriteLog) -> None:
    tokens = token_count(graph)
    pointwise = _pointwise_rule(tokens)
    rules: dict[Any, Rule] = dict.fromkeys(POINTWISE, pointwise)
    apply_rules(graph, rules | {aten.repeat.default: _repeat_rule(tokens), aten.reshape.default: _reshape}, log)


def _repeat_rule(tokens: SymInt) -> Rule:
    def rule(node: fx.Node) -> Call | None:
        source, (runs, *others) = node.args[0], call_arguments(node)["repeats"]
        value = tensor_of(source)
        if value is None or value.dim() != len(others) + 1 or not isinstance(runs, int) or runs < 2:
            return None
        if not same_size(value.shape[0], tokens) or any(n != 1 for n in others):
            return None
        spread = Call(aten.expand.default, (Call(aten.unsqueeze.default, (source, 1)), [-1, runs, *[-1] * len(others)]))
        return _merged(Call(aten.transpose.int, (spread, 0, 1)), node.meta["val"])

    return rule


def _pointwise_rule(tokens: SymInt) -> Rule:
    def rule(node: fx.Node) -> Call | None:
        value = tensor_of(node)
        if value is None or value.dim() < 2 or same_size(value.shape[0], tokens):
            return None
        args: list[Any] = []
        runs: set[int] = set()
        for argument in node.args:
            tensor = tensor_of(argument)
            if tensor is None or tensor.dim() < value.dim():
                args.append(argument)
                continue
            apart = _apart(argument)
            if apart is None:
                return None
            whole, count = apart
            runs.add(count)
            args.append(whole)
        return _merged(Call(node.target, tuple(args), dict(node.kwargs)), value) if len(runs) == 1 else None

    return rule


def _merged(whole: Call, value: torch.Tensor) -> Call | None:
    sizes = sizes_with_inferred(value.shape)
    return None if sizes is None else Call(aten.reshape.default, (whole, sizes))


def _apart(node: Any) -> tuple[fx.Node | Call, int] | None:
    """(x, n) of reshape(x [n, T, …], [n·T, …]), with an axis of size 1 behind them if only the result has one."""
    if not isinstance(node, fx.Node) or node.target is not aten.reshape.default:
        return None
    source, before, after = node.args[0], tensor_of(node.args[0]), tensor_of(node)
    if before is None or after is None or before.dim() < 2 or not isinstance(source, fx.Node):
        return None
    runs: Any = before.shape[0]
    if isinstance(runs, SymInt) or not same_size(runs * before.shape[1], after.shape[0]):
        return None
    if same_shape(before.shape[2:], after.shape[1:]):
        return source, runs
    if before.dim() == 2 and after.dim() == 2 and is_one(after.shape[1]):
        return Call(aten.unsqueeze.default, (source, 2)), runs
    return None


def _reshape(node: fx.Node) -> fx.Node | None:
    apart = _apart(node.args[0])
    if apart is None or not isinstance(apart[0], fx.Node):
        return None
    return apart[0] if same_value(tensor_of(apart[0]), tensor_of(node)) else None


def _every_expert(scores: Any, x: Any) -> Any:
    by_expert = aten.reshape.default(scores, [-1, 1])
    return aten.reshape.default(aten.mul.Tensor(aten.repeat.default(x, [3, 1]), by_expert), [3, -1, 4])


separate_repeats = GraphPass(
    "separate_repeats",
    _run,
    Numerics.EXACT,
    Stage.CAPTURED,
    examples=(Example(_every_expert, {"scores": (3, "T"), "x": ("T", 4)}),),
)
