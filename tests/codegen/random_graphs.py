"""Random graphs of pointwise, broadcast, reduction and shape work, as passes may leave it."""

from __future__ import annotations

import random

from torch import fx

from llmc.frontends.checkpoints.memory_source import MemorySource
from llmc.graph.model_graph import ModelGraph
from tests.codegen.tiny_models import CHANNELS, HEAD_DIM, HEADS, VOCABULARY, GraphBuilder, aten, ops

_UNARY = ("neg", "tanh", "sigmoid", "silu", "relu", "gelu", "abs", "erf", "cos")
_BINARY = ("add", "sub", "mul", "maximum", "minimum")


def random_graph(seed: int, nodes: int) -> tuple[ModelGraph, MemorySource]:
    """A graph of about `nodes` such nodes over the embedding of the tokens; logits are [L, CHANNELS]."""
    choose = random.Random(seed)
    b = GraphBuilder()
    table = b.weight("embed", VOCABULARY, CHANNELS, scale=1.0)
    vectors = [b.weight(f"vector_{i}", CHANNELS, scale=1.0) for i in range(2)]
    pool = [b.call(ops.embedding.default, b.inputs["input_ids"], table)]
    for _ in range(nodes):
        pool.append(_random_node(b, choose, pool, vectors))
    # Everything must matter: sum what nobody has read.
    unread = [node for node in pool if not node.users]
    total = unread[0]
    for node in unread[1:]:
        total = b.call(aten.add.Tensor, total, node)
    bounded = b.call(aten.tanh.default, b.call(aten.mul.Tensor, total, 0.1))
    return b.finish(b.call(ops.select_rows.default, bounded, b.inputs["logit_rows"]))


def _random_node(b: GraphBuilder, choose: random.Random, pool: list[fx.Node], vectors: list[fx.Node]) -> fx.Node:
    """One more node of shape [T, CHANNELS]; what grows is brought back near 1."""
    x, y = choose.choice(pool[-6:]), choose.choice(pool[-6:])
    kind = choose.randrange(9)
    if kind == 0:
        return b.call(getattr(aten, choose.choice(_UNARY)).default, x)
    if kind == 1:
        return _binary(b, choose, x, y)
    if kind == 2:
        return _binary(b, choose, x, choose.choice(vectors))
    if kind == 3:
        return b.call(aten.mul.Tensor, x, choose.choice((0.5, -1.5, 2)))
    if kind == 4:
        keep = choose.random() < 0.5
        reduced = choose.choice((aten.mean.dim, aten.amax.default))
        value = b.call(reduced, x, [-1], keep)
        return b.call(aten.sub.Tensor, y, value if keep else b.call(aten.unsqueeze.default, value, -1))
    if kind == 5:
        heads = b.call(aten.reshape.default, x, [-1, HEADS, HEAD_DIM])
        mean = b.call(aten.mean.dim, b.call(aten.pow.Tensor_Scalar, heads, 2), [-1], True)
        scale = b.call(aten.rsqrt.default, b.call(aten.add.Tensor, mean, 1e-3))
        return b.call(aten.reshape.default, b.call(aten.mul.Tensor, heads, scale), [-1, CHANNELS])
    if kind == 6:
        halves = [b.call(aten.slice.Tensor, x, 1, i * CHANNELS // 2, (i + 1) * CHANNELS // 2) for i in range(2)]
        return b.call(aten.cat.default, [b.call(aten.neg.default, halves[1]), halves[0]], -1)
    if kind == 7:
        heads = b.call(aten.reshape.default, x, [-1, HEADS, HEAD_DIM])
        turned = b.call(aten.transpose.int, heads, 1, 2)
        return b.call(aten.reshape.default, turned, [-1, CHANNELS])
    mask = b.call(aten.gt.Tensor, x, y)
    return b.call(aten.where.self, mask, b.call(aten.relu.default, x), y)


def _binary(b: GraphBuilder, choose: random.Random, x: fx.Node, y: fx.Node) -> fx.Node:
    name = choose.choice(_BINARY)
    op = getattr(aten, name)
    return b.call(op.default if name.endswith("imum") else op.Tensor, x, y)
