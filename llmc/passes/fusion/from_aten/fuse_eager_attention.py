"""Recognise attention that is written out as llmc.attention.

    matmul(softmax(where(mask, matmul(q, kᵀ) · scale, -inf)), v)           →  llmc.attention(q, k, v, scale), by token
    matmul(softmax(cap · tanh(matmul(q, kᵀ) · scale / cap) + mask)), v)    →  the same with softcap and window
Must have: a mask whose values are causal; a softmax over keys whose result only weighs the values; constant factors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from llmc.graph.call_arguments import call_arguments
from llmc.graph.model_graph import ModelGraph
from llmc.graph.refusal import Refusal
from llmc.graph.render import op_name
from llmc.graph.stage import Stage
from llmc.options import BuildOptions
from llmc.passes.evaluation import value_at
from llmc.passes.fusion.from_aten.attention_call import attention_call
from llmc.passes.fusion.from_aten.causal_mask import CausalMask, read_mask
from llmc.passes.node_rules import Call, substitute
from llmc.passes.rewrite import GraphPass, Numerics
from llmc.passes.rewrite_log import RewriteLog
from llmc.passes.shapes import front_dim, tensor_of

aten = torch.ops.aten

_HIDDEN = -1e4


@dataclass(frozen=True)
class _Scores:
    """What the softmax is taken of, read backwards: mask(softcap(scale · q·kᵀ)). product: the matmul at the start."""

    product: fx.Node
    scale: float = 1.0
    softcap: float | None = None
    mask: CausalMask | None = None


def _run(graph: ModelGraph, options: BuildOptions, log: RewriteLog) -> None:
    for softmax in graph.graph.find_nodes(op="call_function", target=aten.softmax.int):
        found = _recognise(softmax, graph)
        if isinstance(found, Refusal):
            log.refuse(found)
            continue
        weighted, call = found
        log.step(f"{op_name(weighted.target)} {weighted.name} → llmc.attention", weighted, softmax)
        substitute(graph.graph, weighted, call)


def _recognise(softmax: fx.Node, graph: ModelGraph) -> tuple[fx.Node, Call] | Refusal:
    value = tensor_of(softmax)
    if value is None or front_dim(call_arguments(softmax)["dim"], value.dim()) != value.dim() - 1:
        return Refusal("the softmax is not over the last axis", softmax)
    weighted = _weighted_values(softmax)
    if isinstance(weighted, Refusal):
        return weighted
    scores = _read_scores(softmax.args[0], graph)
    if isinstance(scores, Refusal):
        return scores
    if scores.mask is None:
        return Refusal("the attention is not causal: its scores are not masked", softmax)
    query, keys = scores.product.args
    if not isinstance(keys, fx.Node) or not _swaps_last(keys):
        return Refusal(f"the keys of {scores.product.name} are not transposed: {keys}", scores.product)
    qkv = (query, keys.args[0], weighted.args[1])
    call = attention_call(weighted, qkv, scores.scale, scores.mask, scores.softcap)
    return call if isinstance(call, Refusal) else (weighted, call)


def _weighted_values(softmax: fx.Node) -> fx.Node | Refusal:
    """The product of the softmax with the values."""
    node = softmax
    while True:
        users = list(node.users)
        if len(users) != 1:
            return Refusal(f"the attention weights have {len(users)} uses: {[u.name for u in users]}", node)
        user = users[0]
        if user.target is aten.matmul.default and user.args[0] is node:
            return user
        if user.target is not aten._to_copy.default:
            return Refusal(f"the attention weights go into {op_name(user.target)} {user.name}, expected matmul", node)
        node = user


def _read_scores(value: Any, graph: ModelGraph) -> _Scores | Refusal:
    node = _uncast(value)
    if node.target is aten.matmul.default:
        return _Scores(node)
    if node.target in (aten.mul.Tensor, aten.div.Tensor) and isinstance(node.args[1], int | float):
        return _read_factor(node, float(node.args[1]), graph)
    if node.target is aten.where.self:
        return _read_where(node, graph)
    if node.target is aten.add.Tensor:
        return _read_added(node, graph)
    return Refusal(f"the scores go through {op_name(node.target)} {node.name}", node)


def _read_factor(node: fx.Node, number: float, graph: ModelGraph) -> _Scores | Refusal:
    factor = number if node.target is aten.mul.Tensor else 1 / number
    inner = _uncast(node.args[0])
    if inner.target is aten.tanh.default:
        scores = _read_scores(inner.args[0], graph)
        if isinstance(scores, Refusal):
            return scores
        # The factor before the tanh holds the scale and the cap's inverse.
        return replace(scores, scale=scores.scale * factor, softcap=factor)
    scores = _read_scores(inner, graph)
    if isinstance(scores, _Scores) and (scores.mask is not None or scores.softcap is not None):
        return Refusal(f"the scores are multiplied by {factor} after the mask or the softcap", node)
    return scores if isinstance(scores, Refusal) else replace(scores, scale=scores.scale * factor)


def _read_where(node: fx.Node, graph: ModelGraph) -> _Scores | Refusal:
    condition, first, second = (_uncast(a) for a in node.args)
    for scores_node, filling, true_hides in ((second, first, True), (first, second, False)):
        number = value_at(filling, graph, torch.arange(2))
        if isinstance(number, Refusal):
            continue
        if number.numel() != 1 or number.item() > _HIDDEN:
            return Refusal(f"masked scores become {number.flatten()[0].item()}, expected less than {_HIDDEN}", node)
        return _masked(scores_node, read_mask(condition, graph, true_hides=true_hides), graph)
    return Refusal(f"neither {first.name} nor {second.name} is a constant for masked scores", node)


def _read_added(node: fx.Node, graph: ModelGraph) -> _Scores | Refusal:
    reasons: list[Refusal] = []
    for scores_node, mask_node in (node.args[:2], node.args[1::-1]):
        if isinstance(mask_node, fx.Node) and isinstance(scores_node, fx.Node):
            mask = read_mask(mask_node, graph)
            if isinstance(mask, CausalMask):
                return _masked(scores_node, mask, graph)
            reasons.append(mask)
    return reasons[0] if reasons else Refusal(f"{node.args[1]} is added to the scores", node)


def _masked(scores_node: fx.Node, mask: CausalMask | Refusal, graph: ModelGraph) -> _Scores | Refusal:
    scores = _read_scores(scores_node, graph)
    if isinstance(mask, Refusal) or isinstance(scores, Refusal):
        return mask if isinstance(mask, Refusal) else scores
    if scores.mask is not None:
        return Refusal("the scores are masked twice", scores_node)
    return replace(scores, mask=mask)


def _uncast(value: Any) -> fx.Node:
    node: fx.Node = value
    while node.target is aten._to_copy.default and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _swaps_last(node: fx.Node) -> bool:
    value = tensor_of(node)
    if node.target is not aten.transpose.int or value is None:
        return False
    arguments = call_arguments(node)
    dims = sorted(front_dim(arguments[name], value.dim()) for name in ("dim0", "dim1"))
    return dims == [value.dim() - 2, value.dim() - 1]


fuse_eager_attention = GraphPass("fuse_eager_attention", _run, Numerics.REORDER, Stage.CAPTURED)
