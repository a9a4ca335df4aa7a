"""Turn products of all tokens with all experts' weights, stored in one tensor, into products of experts.

    matmul(x [n, T, in], weight [n, in, out])
        →  transpose(expert_linear(transpose(x), weights [n · out, in], index of every expert, n), 0, 1)
    sum(transpose(expert_linear(…), 0, 1), 0)  →  sum_experts(expert_linear(…), ones)
    to(sum(to(transpose(expert_linear(…), 0, 1), f32), 0), dtype)  →  the same, which sums up in fp32 and rounds once
Must have: weights that are known when the engine is built. Llama 4's are computed so, for all experts, with zeros for
those that a token was not sent to.
"""

from functools import partial
from typing import Any

import torch
from torch import SymInt, fx

from llmc.graph.call_arguments import call_arguments
from llmc.graph.model_graph import ModelGraph
from llmc.passes.example import Example
from llmc.passes.node_rules import Call, Rule, rule_pass
from llmc.passes.recorded_graph import constant_weight
from llmc.passes.rewrite import Numerics
from llmc.passes.shapes import shape_of
from llmc.passes.uses import is_weight

aten = torch.ops.aten


def _rules(graph: ModelGraph) -> dict[Any, Rule]:
    return {
        aten.matmul.default: partial(_product, graph),
        aten.sum.dim_IntList: _sum,
        aten._to_copy.default: _rounded_sum,
    }


def _product(graph: ModelGraph, node: fx.Node) -> Call | None:
    x, weight = node.args
    shape, weights = shape_of(x), shape_of(weight)
    if len(shape) != 3 or len(weights) != 3 or not is_weight(weight, graph) or not isinstance(shape[1], SymInt):
        return None
    experts, depth, width = map(int, weights)
    rows = Call(aten.reshape.default, (Call(aten.transpose.int, (weight, 1, 2)), [experts * width, depth]))
    by_token = Call(aten.transpose.int, (x, 0, 1))
    operands = by_token, rows, None, _every_expert(graph, experts), experts
    return Call(aten.transpose.int, (Call(torch.ops.llmc.expert_linear.default, operands), 0, 1))


def _sum(node: fx.Node) -> Call | None:
    return _summed(node, node.args[0], node)


def _rounded_sum(node: fx.Node) -> Call | None:
    """A sum in fp32 of operands that were widened for it."""
    total: Any = node.args[0]
    if total.target is not aten.sum.dim_IntList or total.args[0].target is not aten._to_copy.default:
        return None
    wide = total.args[0].meta["val"].dtype, total.meta["val"].dtype
    return _summed(total, total.args[0].args[0], node) if wide == (torch.float32, torch.float32) else None


def _summed(total: fx.Node, by_expert: Any, result: fx.Node) -> Call | None:
    arguments, dtype = call_arguments(total), result.meta["val"].dtype
    if list(arguments["dim"] or ()) != [0] or arguments["keepdim"]:
        return None
    if by_expert.target is not aten.transpose.int or by_expert.args[1:] != (0, 1):
        return None
    product = by_expert.args[0]
    if product.target is not torch.ops.llmc.expert_linear.default or product.meta["val"].dtype is not dtype:
        return None
    ones = Call(aten.full_like.default, (call_arguments(product)["index"], 1), {"dtype": dtype})
    return Call(torch.ops.llmc.sum_experts.default, (product, ones))


def _every_expert(graph: ModelGraph, experts: int) -> Call:
    """[T, experts]: each token goes to each."""
    positions = next(n for n in graph.inputs() if n.name == "positions")
    weight = constant_weight(graph, "experts", torch.arange(experts))
    nothing = Call(aten.unsqueeze.default, (Call(aten.full_like.default, (positions, 0)), 1))
    return Call(aten.add.Tensor, (nothing, weight))


def _of_every_expert(x: Any, weight: Any, positions: Any) -> tuple[Any, Any]:
    products, dtype = aten.matmul.default(x, weight), torch.float32
    wide = aten._to_copy.default(aten.matmul.default(x, weight), dtype=dtype)
    rounded = aten._to_copy.default(aten.sum.dim_IntList(wide, [0]), dtype=dtype)
    return aten.sum.dim_IntList(products, [0]), rounded


_TENSORS = {"x": (2, "T", 3), "weight": (2, 3, 2), "positions": torch.tensor([0, 1, 2])}
fuse_expert_linear = rule_pass(
    "fuse_expert_linear", _rules, Numerics.REORDER, Example(_of_every_expert, _TENSORS, frozenset({"weight"}))
)
