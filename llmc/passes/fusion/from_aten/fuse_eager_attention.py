"""Recognise attention that is written out as llmc.attention.

    matmul(softmax(where(mask, matmul(q, kᵀ) · scale, -inf)), v)           →  llmc.attention(q, k, v, scale), by token
    matmul(softmax(cap · tanh(matmul(q, kᵀ) · scale / cap) + mask)), v)    →  the same with softcap and window
    matmul(softmax(matmul(q, kᵀ) · scale + bias + mask)), v)               →  the same with slopes, a bias by position
Must have: a mask whose values are causal; a softmax over keys whose result only weighs the values; one factor.
"""

from typing import Any

import torch
from torch import fx

from llmc.graph.call_arguments import call_arguments
from llmc.graph.model_graph import ModelGraph
from llmc.graph.refusal import Refused
from llmc.graph.render import op_name
from llmc.graph.stage import Stage
from llmc.options import BuildOptions
from llmc.passes.example import Example
from llmc.passes.fusion.from_aten.attention_call import attention_call
from llmc.passes.fusion.from_aten.attention_scores import read_scores
from llmc.passes.node_rules import Call, substitute
from llmc.passes.rewrite import GraphPass, Numerics
from llmc.passes.rewrite_log import RewriteLog
from llmc.passes.shapes import dim_of, fake_of

aten = torch.ops.aten


def _run(graph: ModelGraph, options: BuildOptions, log: RewriteLog) -> None:
    for softmax in graph.graph.find_nodes(op="call_function", target=aten.softmax.int):
        with log.refusing():
            weighted, call = _recognise(softmax, graph)
            log.step(f"{op_name(weighted.target)} {weighted.name} → llmc.attention", weighted, softmax)
            substitute(graph.graph, weighted, call)


def _recognise(softmax: fx.Node, graph: ModelGraph) -> tuple[fx.Node, Call]:
    if dim_of(softmax) != fake_of(softmax).dim() - 1:
        raise Refused("the softmax is not over the last axis", softmax)
    weighted = _weighted_values(softmax)
    scores = read_scores(softmax, graph)
    query, keys = (call_arguments(scores.product)[name] for name in ("self", "other"))
    if not _swaps_last(keys):
        raise Refused(f"the keys of {scores.product.name} are not transposed: {keys}", scores.product)
    values = call_arguments(weighted)["other"]
    qkv = (_before_widening(query, values), _before_widening(keys.args[0], values), values)
    return weighted, attention_call(graph, weighted, qkv, scores.scale, scores.mask, scores.softcap)


def _weighted_values(softmax: fx.Node) -> fx.Node:
    node = softmax
    while True:
        users = list(node.users)
        if len(users) != 1:
            raise Refused(f"the attention weights have {len(users)} uses: {[u.name for u in users]}", node)
        user = users[0]
        if user.target is aten.matmul.default and user.args[0] is node:
            return user
        if user.target is not aten._to_copy.default:
            raise Refused(f"the attention weights go into {op_name(user.target)} {user.name}, expected matmul", node)
        node = user


def _before_widening(node: fx.Node, values: fx.Node) -> fx.Node:
    """x of the values' dtype where node is x in fp32, in which llmc.attention has scores of any dtype; else node."""
    if node.target is not aten._to_copy.default or fake_of(node).dtype is not torch.float32:
        return node
    source = node.all_input_nodes[0]
    return source if fake_of(source).dtype is fake_of(values).dtype else node


def _swaps_last(node: fx.Node) -> bool:
    if node.target is not aten.transpose.int:
        return False
    rank = fake_of(node).dim()
    return {dim_of(node, "dim0"), dim_of(node, "dim1")} == {rank - 2, rank - 1}


def _masked(q: Any, k: Any, v: Any, positions: Any) -> Any:
    scores = aten.mul.Tensor(aten.matmul.default(q, aten.transpose.int(k, 1, 2)), 0.5)
    seen = aten.le.Tensor(aten.unsqueeze.default(positions, 0), aten.unsqueeze.default(positions, 1))
    mask = aten.where.Scalar(seen, 0.0, float("-inf"))
    return aten.matmul.default(aten.softmax.int(aten.add.Tensor(scores, mask), -1), v)


_TENSORS = {"q": (2, "T", 2), "k": (2, "T", 2), "v": (2, "T", 1), "positions": torch.tensor([0, 1, 2])}
fuse_eager_attention = GraphPass(
    "fuse_eager_attention",
    _run,
    Numerics.REORDER,
    Stage.CAPTURED,
    examples=(Example(_masked, _TENSORS),),
)
