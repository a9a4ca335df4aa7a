"""The matrix products: llmc::linear, its fused forms, and llmc::lm_head.

Weights are [out, in] as in torch.nn.Linear. Sums are taken in fp32 and rounded once, at the end.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmc.ops.activation import apply_activation
from llmc.ops.registry import op


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = x.float() @ weight.float().t()
    return y if bias is None else y + bias.float()


def _fake_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@op("linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor", fake=_fake_linear)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """y = x·weightᵀ + bias. x: [..., in]; weight: [out, in]; bias: [out]; returns [..., out] in x's dtype."""
    return _product(x, weight, bias).to(x.dtype)


def _fake_fused(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str, scale: float
) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@op(
    "fused_linear(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, str activation, float scale) -> Tensor",
    fake=_fake_fused,
)
def fused_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str, scale: float
) -> Tensor:
    """y = activation(x·weightᵀ + bias)·scale + residual, rounded once. residual: [..., out], x's dtype.

    activation: a name from llmc.ops.activation, "identity" for none. scale: 1.0 for none (Granite's
    residual multiplier).
    """
    y = apply_activation(_product(x, weight, bias), activation) * scale
    return (y if residual is None else y + residual.float()).to(x.dtype)


def _fake_gated(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0] // 2))


@op("gated_linear(Tensor x, Tensor weight, Tensor? bias, str activation) -> Tensor", fake=_fake_gated)
def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """y = activation(x·gateᵀ)·(x·upᵀ), where weight: [2·out, in] is gate's rows followed by up's.

    bias: [2·out]; returns [..., out] in x's dtype. Source: Shazeer 2020, "GLU variants improve transformer".
    """
    gate, up = _product(x, weight, bias).chunk(2, dim=-1)
    return (apply_activation(gate, activation) * up).to(x.dtype)


def _fake_lm_head(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=torch.float32)


@op("lm_head(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor", fake=_fake_lm_head)
def lm_head(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Logits, left in fp32. x: [rows, channels]; weight: [vocabulary, channels], often tied to the embedding."""
    return _product(x, weight, bias)
