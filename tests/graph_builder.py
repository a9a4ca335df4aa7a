"""Build small canonical graphs by hand, with fake values and random weights, without any capture."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from operator import getitem
from types import MappingProxyType
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
    """Appends nodes whose fake values are computed on the way; `finish` makes the ModelGraph. Weights go first."""

    def __init__(self, *, dtype: torch.dtype = torch.float32, vocab_size: int = 17, seed: int = 0) -> None:
        self.graph = fx.Graph()
        self.dtype, self.vocab_size = dtype, vocab_size
        self.source = TensorSource()
        self.mode = FakeTensorMode(shape_env=ShapeEnv())
        self.recipes: dict[str, Recipe] = {}
        self.embedding: fx.Node
        self.generator = torch.Generator().manual_seed(seed)
        tokens = self.mode.from_tensor(
            torch.zeros(6, dtype=torch.int64),
            symbolic_context=StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC]),
            source=ConstantSource("tokens"),
        )
        self.input_ids = self._placeholder("input_ids", tokens)
        self.positions = self._placeholder("positions", tokens)

    def weight(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> fx.Node:
        """A weight placeholder with random data of spread 1 / sqrt(last axis)."""
        dtype = dtype or self.dtype
        identifier = name.replace(".", "_")
        value = torch.randn(shape, generator=self.generator) * shape[-1] ** -0.5
        self.source.tensors[name] = value.to(dtype)
        self.recipes[identifier] = Stored(name, dtype)
        with self.mode:
            return self._placeholder(identifier, torch.empty(shape, dtype=dtype))

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Append a call and its fake value."""
        node = self.graph.call_function(target, args, kwargs)
        with self.mode:
            values, named = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
            node.meta["val"] = target(*values, **named)
        return node

    def embedded(self, width: int = 8) -> fx.Node:
        """The tokens' rows of an embedding table, [T, width]."""
        self.embedding = self.weight("embed", self.vocab_size, width)
        return self.call(torch.ops.llmc.embedding.default, self.input_ids, self.embedding)

    def angles(self, half: int = 2) -> tuple[fx.Node, fx.Node]:
        """cos and sin of the positions' angles, [T, half]."""
        inv_freq = self.weight("inv_freq", half, dtype=torch.float32)
        both = self.call(torch.ops.llmc.rope_angles.default, self.positions, inv_freq, 1.0)
        return self.part(both, 0), self.part(both, 1)

    def linear(self, x: fx.Node, name: str, channels: int, *, bias: bool = False) -> fx.Node:
        """A product with a weight of its own."""
        weight = self.weight(f"{name}.weight", channels, x.meta["val"].shape[-1])
        biases = (self.weight(f"{name}.bias", channels),) if bias else ()
        return self.call(torch.ops.llmc.linear.default, x, weight, *biases)

    def rms_norm(self, x: fx.Node, name: str) -> fx.Node:
        """An RMSNorm with a weight of its own."""
        weight = self.weight(f"{name}.weight", x.meta["val"].shape[-1])
        return self.call(torch.ops.llmc.rms_norm.default, x, weight, 1e-5)

    def part(self, several: fx.Node, index: int) -> fx.Node:
        """One result of an op that has several."""
        return self.call(getitem, several, index)

    def finish(self, hidden: fx.Node) -> tuple[ModelGraph, TensorSource]:
        """The canonical graph that returns the logits of hidden over the embedding table, and its weights."""
        return self.finish_with(self.call(torch.ops.llmc.lm_head.default, hidden, self.embedding))

    def finish_with(self, logits: fx.Node) -> tuple[ModelGraph, TensorSource]:
        """The canonical graph that returns these logits, and its weights."""
        self.graph.output(logits)
        self.graph.lint()
        info = ModelInfo("built", "module", self.vocab_size, None, self.dtype)
        return ModelGraph(self.graph, Stage.CANONICAL, self.recipes, info), self.source

    def _placeholder(self, name: str, value: Tensor) -> fx.Node:
        present = self.graph.find_nodes(op="placeholder")
        with self.graph.inserting_after(present[-1]) if present else nullcontext():
            node = self.graph.placeholder(name)
        node.meta["val"] = value
        return node


def llama(
    *, layers: int = 2, dtype: torch.dtype = torch.float32, kv_heads: Mapping[int, int] = MappingProxyType({})
) -> tuple[ModelGraph, TensorSource]:
    """A llama: width 8, two heads of 4 over one KV head, gated MLP of 12, tied embedding.

    kv_heads: by layer, where there are two.
    """
    b = GraphBuilder(dtype=dtype)
    ops, aten = torch.ops.llmc, torch.ops.aten
    h = b.embedded()
    cos, sin = b.angles()
    for i in range(layers):
        x = b.rms_norm(h, f"layers.{i}.norm1")
        q, k, v = (
            b.call(aten.reshape.default, b.linear(x, f"layers.{i}.{name}", heads * 4), [-1, heads, 4])
            for name, heads in (("q", 2), ("k", kv_heads.get(i, 1)), ("v", kv_heads.get(i, 1)))
        )
        q, k = (b.call(ops.rope.default, t, cos, sin, False) for t in (q, k))
        y = b.call(aten.reshape.default, b.call(ops.attention.default, q, k, v, 0.5), [-1, 8])
        h = b.call(aten.add.Tensor, h, b.linear(y, f"layers.{i}.o", 8))
        x = b.rms_norm(h, f"layers.{i}.norm2")
        gate, up = (b.linear(x, f"layers.{i}.{name}", 12) for name in ("gate", "up"))
        inner = b.call(ops.gated_activation.default, gate, up, "silu")
        h = b.call(aten.add.Tensor, h, b.linear(inner, f"layers.{i}.down", 8))
    return b.finish(b.rms_norm(h, "norm"))
