"""Keep heads, which a model merges with the tokens into one axis, apart on an axis of their own.

    op(merged(x), merged(y)), of pointwise ops                  →  merged(op(x, y))
    op(merged(x), …), of norms, products and sums of each row   →  merged(op(x, …))
where merged(x) is reshape(x [T, n, …], [T·n, …]).
Must have: as many heads in all of them. What is left are reshapes of reshapes, which simplify_layout takes away.
"""

import math
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
from llmc.passes.shapes import front_dim, is_one, same_size, sizes_with_inferred, tensor_of

aten = torch.ops.aten
_NORMS = (aten.layer_norm.default, aten.rms_norm.default)
_SUMS = (aten.mean.dim, aten.sum.dim_IntList)


def _run(graph: ModelGraph, options: BuildOptions, log: RewriteLog) -> None:
    heads = _Heads(token_count(graph))
    rules: dict[Any, Rule] = dict.fromkeys(POINTWISE, heads.pointwise)
    rules |= dict.fromkeys((*_NORMS, *_SUMS, aten.linear.default), heads.over_rows)
    apply_rules(graph, rules, log)


class _Heads:
    """The rules, of a graph with so many tokens."""

    def __init__(self, tokens: SymInt) -> None:
        self._tokens = tokens

    def pointwise(self, node: fx.Node) -> Call | None:
        value = tensor_of(node)
        if value is None or value.dim() == 0:
            return None
        args: list[Any] = []
        counts: set[int] = set()
        for argument in node.args:
            tensor = tensor_of(argument)
            if tensor is None or tensor.dim() < value.dim() or is_one(tensor.shape[0]):
                args.append(argument)
                continue
            found = self._apart(argument)
            if found is None:
                return None
            apart, count = found
            counts.add(count)
            args.append(apart)
        return _merged(Call(node.target, tuple(args), dict(node.kwargs)), value) if len(counts) == 1 else None

    def over_rows(self, node: fx.Node) -> Call | None:
        found, before, value = self._apart(node.args[0]), tensor_of(node.args[0]), tensor_of(node)
        if found is None or before is None or value is None:
            return None
        rest = list(node.args[1:])
        if node.target in _SUMS:
            dims = [front_dim(dim, before.dim()) for dim in call_arguments(node)["dim"]]
            if 0 in dims:
                return None
            rest[0] = [dim + 1 for dim in dims]
        elif node.target in _NORMS and len(call_arguments(node)["normalized_shape"]) == before.dim():
            return None
        return _merged(Call(node.target, (found[0], *rest), dict(node.kwargs)), value)

    def _apart(self, node: Any) -> tuple[Call, int] | None:
        """(x, n) of reshape(x, [T·n, …]) of tokens."""
        if not isinstance(node, fx.Node) or node.target is not aten.reshape.default:
            return None
        before, after = tensor_of(node.args[0]), tensor_of(node)
        if before is None or after is None or not before.dim() or not same_size(before.shape[0], self._tokens):
            return None
        behind, rest = list(before.shape[1:]), list(after.shape[1:])
        if any(isinstance(size, SymInt) for size in behind + rest) or 0 in rest:
            return None
        count = math.prod(behind) // math.prod(rest)
        if count < 2 or not same_size(count * self._tokens, after.shape[0]):
            return None
        return Call(aten.reshape.default, (node.args[0], [-1, count, *rest])), count


def _merged(apart: Call, value: torch.Tensor) -> Call | None:
    sizes = sizes_with_inferred(value.shape)
    return None if sizes is None else Call(aten.reshape.default, (apart, sizes))


def _gated_norm(scale: Any, x: Any, gate: Any, weight: Any) -> Any:
    """Of heads with a gate, as the gated delta net has it; of tokens with a scale."""
    rows, gates = (aten.reshape.default(each, [-1, 4]) for each in (x, gate))
    mean = aten.mean.dim(aten.pow.Tensor_Scalar(rows, 2), [-1], True)
    normed = aten.mul.Tensor(rows, aten.rsqrt.default(aten.add.Tensor(mean, 0.5)))
    gated = aten.mul.Tensor(aten.mul.Tensor(weight, normed), gates)
    return aten.mul.Tensor(aten.reshape.default(gated, [-1, 12]), aten.unsqueeze.default(scale, 1))


separate_heads = GraphPass(
    "separate_heads",
    _run,
    Numerics.EXACT,
    Stage.CAPTURED,
    examples=(Example(_gated_norm, {"scale": ("T",), "x": ("T", 3, 4), "gate": ("T", 12), "weight": (4,)}),),
)
