"""Keep heads, which a model merges with the tokens into one axis, apart on their own axis.

    op(merged(x), merged(y)), of pointwise ops                  →  merged(op(x, y))
    op(merged(x), …), of norms, products and sums of each row   →  merged(op(x, …))
where merged(x) is reshape(x [T, n, …], [T·n, …]).
Must have: the same number of heads in all of them. The remaining reshapes of reshapes are removed by simplify_layout.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import SymInt, fx

from llmc.graph.call_arguments import call_arguments
from llmc.graph.model_graph import ModelGraph
from llmc.graph.pointwise import POINTWISE
from llmc.graph.propagate import token_count
from llmc.passes.example import Example
from llmc.passes.node_rules import Call, Rule, reshaped, rule_pass
from llmc.passes.rewrite import Numerics
from llmc.passes.shapes import fake_of, front_dim, is_one, same_size, shape_of, tensor_of

aten = torch.ops.aten
_NORMS = (aten.layer_norm.default, aten.rms_norm.default)
_SUMS = (aten.mean.dim, aten.sum.dim_IntList)


# x and how many runs or heads it has, where a value is x with these merged into the axis of the tokens.
Apart = Callable[[Any], tuple[fx.Node | Call, int] | None]


def _rules(graph: ModelGraph) -> dict[Any, Rule]:
    apart = partial(_apart, token_count(graph))
    return {
        **dict.fromkeys(POINTWISE, partial(pointwise_apart, apart)),
        **dict.fromkeys((*_NORMS, *_SUMS, aten.linear.default), partial(_over_rows, apart)),
    }


def pointwise_apart(apart: Apart, node: fx.Node) -> Call | None:
    """op(merged(x), merged(y))  →  merged(op(x, y)), with operands that have no such axis, or one of size 1."""
    value = fake_of(node)
    args: list[Any] = []
    counts: set[int] = set()
    for argument in node.args:
        tensor = tensor_of(argument)
        if tensor is None or tensor.dim() < max(value.dim(), 1) or is_one(tensor.shape[0]):
            args.append(argument)
            continue
        separated = apart(argument)
        if separated is None:
            return None
        args.append(separated[0])
        counts.add(separated[1])
    return reshaped(Call(node.target, tuple(args), dict(node.kwargs)), value.shape) if len(counts) == 1 else None


def _over_rows(apart: Apart, node: fx.Node) -> Call | None:
    separated, rank = apart(node.args[0]), fake_of(node.args[0]).dim()
    if separated is None:
        return None
    rest = list(node.args[1:])
    if node.target in _SUMS:
        dims = [front_dim(dim, rank) for dim in call_arguments(node)["dim"]]
        if 0 in dims:
            return None
        rest[0] = [dim + 1 for dim in dims]
    elif node.target in _NORMS and len(call_arguments(node)["normalized_shape"]) == rank:
        return None
    return reshaped(Call(node.target, (separated[0], *rest), dict(node.kwargs)), shape_of(node))


def _apart(tokens: SymInt, node: Any) -> tuple[Call, int] | None:
    """(x, n) of reshape(x, [T·n, …]) of tokens."""
    if not isinstance(node, fx.Node) or node.target is not aten.reshape.default:
        return None
    source = node.all_input_nodes[0]
    before, after = shape_of(source), shape_of(node)
    if not before or not same_size(before[0], tokens):
        return None
    behind, rest = list(before[1:]), list(after[1:])
    if any(isinstance(size, SymInt) for size in behind + rest) or 0 in rest:
        return None
    count = math.prod(behind) // math.prod(rest)
    if count < 2 or not same_size(count * tokens, after[0]):
        return None
    return Call(aten.reshape.default, (source, [-1, count, *rest])), count


def _gated_norm(scale: Any, x: Any, gate: Any, weight: Any) -> Any:
    """The gated norm of heads, as in the gated delta net, or of tokens with a scale."""
    rows, gates = (aten.reshape.default(value, [-1, 4]) for value in (x, gate))
    mean = aten.mean.dim(aten.pow.Tensor_Scalar(rows, 2), [-1], True)
    normed = aten.mul.Tensor(rows, aten.rsqrt.default(aten.add.Tensor(mean, 0.5)))
    gated = aten.mul.Tensor(aten.mul.Tensor(weight, normed), gates)
    return aten.mul.Tensor(aten.reshape.default(gated, [-1, 12]), aten.unsqueeze.default(scale, 1))


_TENSORS = {"scale": ("T",), "x": ("T", 3, 4), "gate": ("T", 12), "weight": (4,)}
separate_heads = rule_pass("separate_heads", _rules, Numerics.EXACT, Example(_gated_norm, _TENSORS))
