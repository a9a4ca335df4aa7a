"""Build small canonical graphs by hand, with fake values and random weights, without any capture."""

from __future__ import annotations

from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import llmc.ops  # noqa: F401 (registers the ops)
from llmc.graph.model_graph import ModelGraph, ModelInfo
from llmc.graph.stage import Stage
from llmc.graph.weights import Recipe, Stored


class TensorSource:
    """A weight source over tensors in memory."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self.tensors))

    def load(self, name: str) -> Tensor:
        return self.tensors[name]


class GraphBuilder:
    """Appends nodes whose fake values are computed on the way; `finish` makes the ModelGraph."""

    def __init__(self, *, dtype: torch.dtype = torch.float32, vocab_size: int = 17, seed: int = 0) -> None:
        self.graph = fx.Graph()
        self.dtype, self.vocab_size = dtype, vocab_size
        self.source = TensorSource()
        self.mode = FakeTensorMode(shape_env=ShapeEnv())
        self.recipes: dict[str, Recipe] = {}
        self.generator = torch.Generator().manual_seed(seed)
        tokens = self.mode.from_tensor(
            torch.zeros(6, dtype=torch.int64),
            symbolic_context=StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC]),
            source=ConstantSource("tokens"),
        )
        self.input_ids = self._placeholder("input_ids", tokens)
        self.positions = self._placeholder("positions", tokens)

    def weight(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> fx.Node:
        """A weight placeholder with random data of spread 1 / sqrt(last axis); call before any op."""
        value = torch.randn(shape, generator=self.generator) * shape[-1] ** -0.5
        self.source.tensors[name] = value.to(dtype or self.dtype)
        identifier = name.replace(".", "_")
        self.recipes[identifier] = Stored(name, dtype or self.dtype)
        with self.mode:
            return self._placeholder(identifier, torch.empty(shape, dtype=dtype or self.dtype))

    def call(self, target: Any, *args: Any) -> Any:
        """Append a call and its fake value."""
        node = self.graph.call_function(target, args)
        with self.mode:
            node.meta["val"] = target(*fx.map_arg(args, lambda n: n.meta["val"]))
        return node

    def finish(self, logits: fx.Node) -> ModelGraph:
        """The canonical graph that returns the logits."""
        self.graph.output(logits)
        self.graph.lint()
        info = ModelInfo("built", "module", self.vocab_size, None, self.dtype)
        return ModelGraph(self.graph, Stage.CANONICAL, self.recipes, info)

    def _placeholder(self, name: str, value: Tensor) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = value
        return node


def llama(*, layers: int = 2, dtype: torch.dtype = torch.float32) -> tuple[ModelGraph, TensorSource]:
    """A llama: width 8, two heads of 4 over one KV head, gated MLP of 12, tied embedding."""
    return _decoder(GraphBuilder(dtype=dtype), layers)


def _decoder(b: GraphBuilder, layers: int) -> tuple[ModelGraph, TensorSource]:
    ops, aten = torch.ops.llmc, torch.ops.aten
    names = ("norm1", "q", "k", "v", "o", "norm2", "gate", "up", "down")
    shapes = ((8,), (8, 8), (4, 8), (4, 8), (8, 8), (8,), (12, 8), (12, 8), (8, 12))
    embed, final, inv_freq = (
        b.weight("embed", b.vocab_size, 8),
        b.weight("final", 8),
        b.weight("inv_freq", 2, dtype=torch.float32),
    )
    weights = [{n: b.weight(f"layers.{i}.{n}", *s) for n, s in zip(names, shapes, strict=True)} for i in range(layers)]
    h = b.call(ops.embedding.default, b.input_ids, embed)
    angles = b.call(ops.rope_angles.default, b.positions, inv_freq, 1.0)
    cos, sin = (b.call(getitem, angles, i) for i in range(2))
    for w in weights:
        x = b.call(ops.rms_norm.default, h, w["norm1"], 1e-5)
        q, k, v = (
            b.call(aten.reshape.default, b.call(ops.linear.default, x, w[n]), [-1, heads, 4])
            for n, heads in (("q", 2), ("k", 1), ("v", 1))
        )
        q, k = (b.call(ops.rope.default, t, cos, sin, False) for t in (q, k))
        y = b.call(ops.attention.default, q, k, v, 0.5)
        o = b.call(ops.linear.default, b.call(aten.reshape.default, y, [-1, 8]), w["o"])
        h = b.call(aten.add.Tensor, h, o)
        x = b.call(ops.rms_norm.default, h, w["norm2"], 1e-5)
        gate, up = (b.call(ops.linear.default, x, w[n]) for n in ("gate", "up"))
        inner = b.call(ops.gated_activation.default, gate, up, "silu")
        h = b.call(aten.add.Tensor, h, b.call(ops.linear.default, inner, w["down"]))
    logits = b.call(ops.lm_head.default, b.call(ops.rms_norm.default, h, final, 1e-5), embed)
    return b.finish(logits), b.source
