"""Norms, rotation and what else works on rows: llmc::rms_norm, layer_norm, rope, embedding, select_rows, …"""

from typing import Any

import numpy as np
import torch

from llmc.codegen.onnx.function_body import Body, Value, standard
from llmc.codegen.onnx.functions.activations import activation as activated

llmc = torch.ops.llmc


def rms_norm(b: Body, x: Value, weight: Value | None, eps: float) -> str:
    """RMSNormalization, which computes in fp32."""
    return b("RMSNormalization", x, weight or _ones(b, x), axis=-1, epsilon=eps)


def add_rms_norm(b: Body, x: Value, residual: Value, weight: Value | None, eps: float) -> tuple[str, str]:
    """The norm of the sum, and the sum."""
    total = Value(b("Add", x, residual), x.fake)
    return rms_norm(b, total, weight, eps), total.name


def layer_norm(b: Body, x: Value, weight: Value | None, bias: Value | None, eps: float) -> str:
    """LayerNormalization, which computes in fp32."""
    return b("LayerNormalization", x, weight or _ones(b, x), bias, axis=-1, epsilon=eps)


def add_layer_norm(
    b: Body, x: Value, residual: Value, weight: Value | None, bias: Value | None, eps: float
) -> tuple[str, str]:
    """The norm of the sum, and the sum."""
    total = Value(b("Add", x, residual), x.fake)
    return layer_norm(b, total, weight, bias, eps), total.name


def _ones(b: Body, x: Value) -> str:
    return b.constant(np.ones(x.size(-1), np.float32))


def rope_angles(b: Body, positions: Value, inv_freq: Value, scale: float) -> tuple[str, str]:
    """positions[t]·inv_freq[i], their cosines and sines."""
    angles = b("Mul", b.unsqueeze(b.cast(positions, torch.float32), 1), b.unsqueeze(inv_freq, 0))
    cos, sin = b("Cos", angles), b("Sin", angles)
    return (cos, sin) if scale == 1 else (b("Mul", cos, b.number(scale)), b("Mul", sin, b.number(scale)))


def rope(b: Body, x: Value, cos: Value, sin: Value, interleaved: bool) -> str:
    """RotaryEmbedding of one batch whose cache has a row for each token: x, [tokens, heads, head_dim], is [1, tokens,
    heads · head_dim] there."""
    heads, head_dim = x.size(1), x.size(2)
    turned = b(
        "RotaryEmbedding",
        b.reshape(x, 1, -1, heads * head_dim),
        b.unsqueeze(cos, 0),
        b.unsqueeze(sin, 0),
        interleaved=int(interleaved),
        num_heads=heads,
        rotary_embedding_dim=2 * cos.size(1),
    )
    return b.reshape(turned, -1, heads, head_dim)


def embedding(b: Body, ids: Value, weight: Value) -> str:
    """Look up rows of a table."""
    return b("Gather", weight, ids, axis=0)


def rank_rows(b: Body, ids: Value, first: Value, rows: int) -> str:
    """Rows of a rank's part of a table; `rows` for those of other ranks."""
    own = b("Sub", ids, b.cast(first, ids.dtype))
    beyond = b.cast(b.integer(rows), ids.dtype)
    inside = b("And", b("GreaterOrEqual", own, b.cast(b.integer(0), ids.dtype)), b("Less", own, beyond))
    return b("Where", inside, own, beyond)


def select_channels(b: Body, x: Value, order: Value) -> str:
    """Select some channels."""
    return b("Gather", x, order, axis=len(x.shape) - 1)


def gated_activation(b: Body, gate: Value, up: Value, activation: str) -> str:
    """activation(gate)·up."""
    return b("Mul", activated(b, gate, activation), up)


def hand_over(b: Body, x: Value, stage: int) -> str:
    """Return x itself, because all stages are one graph."""
    return b("Identity", x)


FUNCTIONS: dict[Any, Any] = {
    llmc.rms_norm.default: rms_norm,
    llmc.add_rms_norm.default: add_rms_norm,
    llmc.layer_norm.default: layer_norm,
    llmc.add_layer_norm.default: add_layer_norm,
    llmc.rope_angles.default: rope_angles,
    llmc.rope.default: rope,
    llmc.embedding.default: embedding,
    llmc.rank_rows.default: rank_rows,
    llmc.select_rows.default: standard("Gather", axis=0),
    llmc.select_channels.default: select_channels,
    llmc.gated_activation.default: gated_activation,
    llmc.hand_over.default: hand_over,
}
