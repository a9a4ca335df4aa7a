"""Tiny optimized graphs, built by hand node by node, with their weights."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.fx.node import map_arg

import llmc.ops  # noqa: F401  (registers the ops)
from llmc.frontends.checkpoints.memory_source import MemorySource
from llmc.graph.model_graph import CacheSpec, ModelGraph, ModelInfo
from llmc.graph.propagate import symbolic_input
from llmc.graph.stage import Stage
from llmc.graph.weights import Recipe, Stored

aten, ops = torch.ops.aten, torch.ops.llmc

VOCABULARY, CHANNELS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 97, 48, 4, 2, 12, 80
BLOCK_SIZE = 16


class GraphBuilder:
    """An optimized graph that grows a node at a time; every node gets its fake value at once."""

    def __init__(self, dtype: torch.dtype = torch.float32, kv_dtype: torch.dtype | None = None) -> None:
        self.dtype, self.kv_dtype = dtype, kv_dtype or dtype
        self.graph = fx.Graph()
        self.weights: dict[str, Recipe] = {}
        self.tensors: dict[str, Tensor] = {}
        self.caches: list[CacheSpec] = []
        self._mode = FakeTensorMode(shape_env=ShapeEnv())
        self._random = torch.Generator().manual_seed(7)
        context: StatelessSymbolicContext[Any, Any] = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
        ids = self.graph.placeholder("input_ids")
        ids.meta["val"] = self._mode.from_tensor(
            torch.zeros(5, dtype=torch.int32), static_shapes=False, symbolic_context=context
        )
        self.inputs = {"input_ids": ids}
        for name, dims in _STEP_INPUTS.items():
            self._input(name, dims, torch.int32)

    def _input(self, name: str, dims: tuple[str | int, ...], dtype: torch.dtype) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = symbolic_input(self.model(), name, dims, dtype)
        self.inputs[name] = node
        return node

    def cache(
        self, kv_heads: int = KV_HEADS, head_dim: int = HEAD_DIM, value_dim: int = HEAD_DIM
    ) -> tuple[fx.Node, ...]:
        """The two cache inputs of one more layer."""
        layer = len(self.caches)
        self.caches.append(CacheSpec(layer, kv_heads, head_dim, value_dim, self.kv_dtype))
        shapes = {"k": head_dim, "v": value_dim}
        return tuple(
            self._input(f"kv_cache_{layer}_{part}", ("N", kv_heads, BLOCK_SIZE, dim), self.kv_dtype)
            for part, dim in shapes.items()
        )

    def weight(self, name: str, *shape: int, dtype: torch.dtype | None = None, scale: float | None = None) -> fx.Node:
        """A weight of random numbers that keep activations near 1."""
        value = torch.randn(shape, generator=self._random) * (scale or shape[-1] ** -0.5)
        return self.constant(name, value.to(dtype or self.dtype))

    def constant(self, name: str, value: Tensor) -> fx.Node:
        """A weight of that value."""
        node = self.graph.placeholder(name)
        node.meta["val"] = self._mode.from_tensor(value, static_shapes=True)
        self.weights[name], self.tensors[name] = Stored(name, value.dtype), value
        return node

    def call(self, target: Callable[..., Any], *args: Any, source: str | None = None, **kwargs: Any) -> fx.Node:
        """A call_function node. source: a line of a model's code that it comes from."""
        node = self.graph.call_function(target, args, kwargs)
        fake_args, fake_kwargs = map_arg((args, kwargs), lambda n: n.meta["val"])
        with self._mode:
            node.meta["val"] = target(*fake_args, **fake_kwargs)
        if source is not None:
            node.meta["stack_trace"] = f'  File "/models/tiny/model.py", line 7, in forward\n    {source}\n'
        return node

    def model(self) -> ModelGraph:
        """The graph as it is now."""
        info = ModelInfo("tiny", "module", VOCABULARY, 64, self.dtype)
        return ModelGraph(self.graph, Stage.OPTIMIZED, self.weights, info, tuple(self.caches))

    def finish(self, logits: fx.Node) -> tuple[ModelGraph, MemorySource]:
        """The graph that returns `logits`, placeholders first, and its weights."""
        self.graph.output(logits)
        first = next(iter(self.graph.nodes))
        for node in [n for n in self.graph.nodes if n.op == "placeholder"]:
            if node is not first:
                first.append(node)
                first = node
        return self.model(), MemorySource(self.tensors)


_STEP_INPUTS: dict[str, tuple[str | int, ...]] = {
    "positions": ("T",),
    "slot_mapping": ("T",),
    "query_starts": ("R+1",),
    "context_lens": ("R",),
    "block_tables": ("R", "B"),
    "logit_rows": ("L",),
    "tree_masks": ("T",),
}


def llama(dtype: torch.dtype = torch.float32, layers: int = 2) -> tuple[ModelGraph, MemorySource]:
    """RMSNorm, merged QKV, rotary KV write, gated MLP; lm_head tied to the embedding."""
    b = GraphBuilder(dtype)
    table = b.weight("embed", VOCABULARY, CHANNELS, scale=1.0)
    inv_freq = b.constant("inv_freq", 1.0 / 100.0 ** (torch.arange(HEAD_DIM // 2) / (HEAD_DIM // 2)))
    x = b.call(ops.embedding.default, b.inputs["input_ids"], table)
    angles = b.call(ops.rope_angles.default, b.inputs["positions"], inv_freq, 1.0)
    cos, sin = _unpack(b, angles)
    h = b.call(ops.rms_norm.default, x, b.weight("norm_0", CHANNELS, scale=1.0), 1e-5)
    for i in range(layers):
        attended = _attention(b, h, i, cos, sin)
        projected = b.call(ops.linear.default, attended, b.weight(f"o_{i}", CHANNELS, HEADS * HEAD_DIM))
        norm = b.weight(f"post_norm_{i}", CHANNELS, scale=1.0)
        h, x = _unpack(b, b.call(ops.add_rms_norm.default, projected, x, norm, 1e-5))
        gate_up = b.weight(f"gate_up_{i}", 2 * HIDDEN, CHANNELS)
        h = b.call(ops.gated_linear.default, h, gate_up, None, "silu")
        x = b.call(ops.fused_linear.default, h, b.weight(f"down_{i}", CHANNELS, HIDDEN), None, x, "identity", 1.0)
        if i + 1 == layers:
            x = b.call(ops.select_rows.default, x, b.inputs["logit_rows"])
        h = b.call(ops.rms_norm.default, x, b.weight(f"norm_{i + 1}", CHANNELS, scale=1.0), 1e-5)
    return b.finish(b.call(ops.lm_head.default, h, table))


def _attention(b: GraphBuilder, h: fx.Node, layer: int, cos: fx.Node, sin: fx.Node, **options: Any) -> fx.Node:
    width, kv_width = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    qkv = b.call(ops.linear.default, h, b.weight(f"qkv_{layer}", width + 2 * kv_width, CHANNELS))
    edges = (0, width, width + kv_width, width + 2 * kv_width)
    parts = [b.call(aten.slice.Tensor, qkv, 1, edges[i], edges[i + 1]) for i in range(3)]
    q, k, v = (
        b.call(aten.reshape.default, part, [-1, n, HEAD_DIM])
        for part, n in zip(parts, (HEADS, KV_HEADS, KV_HEADS), strict=True)
    )
    k_cache, v_cache = b.cache()
    slots = b.inputs["slot_mapping"]
    q = b.call(ops.rope_kv_write.default, q, k, v, cos, sin, k_cache, v_cache, slots, False)
    tables = [b.inputs[name] for name in ("query_starts", "context_lens", "block_tables")]
    options["tree_masks"] = b.inputs["tree_masks"]
    out = b.call(ops.paged_attention.default, q, k_cache, v_cache, *tables, HEAD_DIM**-0.5, **options)
    return b.call(aten.reshape.default, out, [-1, width])


def _unpack(b: GraphBuilder, node: fx.Node) -> tuple[fx.Node, fx.Node]:
    return b.call(operator.getitem, node, 0), b.call(operator.getitem, node, 1)


def gpt2(dtype: torch.dtype = torch.float32) -> tuple[ModelGraph, MemorySource]:
    """Learned positions added to the embedding, LayerNorm, no rotation, plain MLP, biases, untied head."""
    b = GraphBuilder(dtype)
    tokens = b.call(ops.embedding.default, b.inputs["input_ids"], b.weight("wte", VOCABULARY, CHANNELS, scale=1.0))
    places = b.call(ops.embedding.default, b.inputs["positions"], b.weight("wpe", 64, CHANNELS, scale=1.0))
    x = b.call(aten.add.Tensor, tokens, places, source="hidden = tokens + places")
    norm = [b.weight(f"ln_{i}", CHANNELS, scale=1.0) for i in range(2)]
    bias = [b.weight(f"ln_bias_{i}", CHANNELS, scale=0.1) for i in range(2)]
    h = b.call(ops.layer_norm.default, x, norm[0], bias[0], 1e-5)
    width = HEADS * HEAD_DIM
    qkv = b.call(ops.linear.default, h, b.weight("qkv", 3 * width, CHANNELS), b.weight("qkv_bias", 3 * width))
    q, k, v = (
        b.call(
            aten.reshape.default, b.call(aten.slice.Tensor, qkv, 1, i * width, (i + 1) * width), [-1, HEADS, HEAD_DIM]
        )
        for i in range(3)
    )
    k_cache, v_cache = b.cache(kv_heads=HEADS)
    b.call(ops.kv_write.default, k, v, k_cache, v_cache, b.inputs["slot_mapping"])
    tables = [b.inputs[name] for name in ("query_starts", "context_lens", "block_tables")]
    out = b.call(
        ops.paged_attention.default, q, k_cache, v_cache, *tables, HEAD_DIM**-0.5, 5, tree_masks=b.inputs["tree_masks"]
    )
    out = b.call(aten.reshape.default, out, [-1, width])
    projected = b.call(ops.linear.default, out, b.weight("o", CHANNELS, width), b.weight("o_bias", CHANNELS))
    h, x = _unpack(b, b.call(ops.add_layer_norm.default, projected, x, norm[1], bias[1], 1e-5))
    up, down = b.weight("up", HIDDEN, CHANNELS), b.weight("down", CHANNELS, HIDDEN)
    h = b.call(ops.fused_linear.default, h, up, b.weight("up_bias", HIDDEN), None, "gelu_tanh", 1.0)
    x = b.call(ops.fused_linear.default, h, down, b.weight("down_bias", CHANNELS), x, "identity", 1.0)
    rows = b.call(ops.select_rows.default, x, b.inputs["logit_rows"])
    return b.finish(b.call(ops.lm_head.default, rows, b.weight("head", VOCABULARY, CHANNELS)))


def gemma2(dtype: torch.dtype = torch.float32) -> tuple[ModelGraph, MemorySource]:
    """Scaled embedding, per-head norms, sums after norms, softcapped attention and logits."""
    b = GraphBuilder(dtype)
    table = b.weight("embed", VOCABULARY, CHANNELS, scale=1.0)
    x = b.call(aten.mul.Tensor, b.call(ops.embedding.default, b.inputs["input_ids"], table), CHANNELS**0.5)
    inv_freq = b.constant("inv_freq", 1.0 / 100.0 ** (torch.arange(HEAD_DIM // 2) / (HEAD_DIM // 2)))
    cos, sin = _unpack(b, b.call(ops.rope_angles.default, b.inputs["positions"], inv_freq, 1.0))
    h = b.call(ops.rms_norm.default, x, b.weight("norm", CHANNELS, scale=1.0), 1e-6)
    attended = _attention(b, h, 0, cos, sin, window=6, softcap=5.0)
    h = b.call(ops.linear.default, attended, b.weight("o", CHANNELS, HEADS * HEAD_DIM))
    heads = b.call(aten.reshape.default, h, [-1, HEADS, HEAD_DIM])
    heads = b.call(ops.rms_norm.default, heads, b.weight("head_norm", HEAD_DIM, scale=1.0), 1e-6)
    x = b.call(aten.add.Tensor, x, b.call(aten.reshape.default, heads, [-1, CHANNELS]))
    rows = b.call(ops.select_rows.default, x, b.inputs["logit_rows"])
    logits = b.call(ops.lm_head.default, rows, table)
    capped = b.call(aten.tanh.default, b.call(aten.div.Tensor, logits, 3.0), source="logits = torch.tanh(logits / 3)")
    return b.finish(b.call(aten.mul.Tensor, capped, 3.0))
