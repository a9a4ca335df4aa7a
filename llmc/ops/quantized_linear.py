"""Matrix products over quantized weights, and the embedding that may share them.

Weights are codes, scales and zeros as in weight_codes.py; nothing is rounded between the values that codes stand for
and the fp32 sum. x_format: "none" takes x as it is; "int8" and "fp8" round each token first (token_codes.py), with the
static scale x_scale: [1] or, without one, a scale of the token's own. The rest is as in linear.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmc.ops.activation import apply_activation
from llmc.ops.registry import op
from llmc.ops.token_codes import token_codes, token_values
from llmc.ops.weight_codes import weight_values

_WEIGHT = "Tensor codes, Tensor scales, Tensor? zeros, Tensor? x_scale, Tensor? bias"
_FORMATS = "str format, str x_format"


def _product(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    x_scale: Tensor | None,
    bias: Tensor | None,
    format: str,
    x_format: str,
) -> Tensor:
    rounded = x.float() if x_format == "none" else token_values(*token_codes(x, x_scale, x_format), x_format)
    y = rounded @ weight_values(codes, scales, zeros, format).t()
    return y if bias is None else y + bias.float()


def _fake_linear(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    x_scale: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    scale: float,
    format: str,
    x_format: str,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], codes.shape[0]))


@op(
    f"quantized_linear(Tensor x, {_WEIGHT}, Tensor? residual, str activation, float scale, {_FORMATS}) -> Tensor",
    fake=_fake_linear,
)
def quantized_linear(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    x_scale: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    scale: float,
    format: str,
    x_format: str,
) -> Tensor:
    """y = activation(x·weightᵀ + bias)·scale + residual, rounded once, to x's dtype: llmc::fused_linear."""
    y = apply_activation(_product(x, codes, scales, zeros, x_scale, bias, format, x_format), activation) * scale
    return (y if residual is None else y + residual.float()).to(x.dtype)


def _fake_gated(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    x_scale: Tensor | None,
    bias: Tensor | None,
    activation: str,
    format: str,
    x_format: str,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], codes.shape[0] // 2))


@op(
    f"quantized_gated_linear(Tensor x, {_WEIGHT}, str activation, {_FORMATS}) -> Tensor",
    fake=_fake_gated,
)
def quantized_gated_linear(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    x_scale: Tensor | None,
    bias: Tensor | None,
    activation: str,
    format: str,
    x_format: str,
) -> Tensor:
    """y = activation(x·gateᵀ)·(x·upᵀ), gate's rows followed by up's: llmc::gated_linear."""
    gate, up = _product(x, codes, scales, zeros, x_scale, bias, format, x_format).chunk(2, dim=-1)
    return (apply_activation(gate, activation) * up).to(x.dtype)


def _fake_lm_head(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    x_scale: Tensor | None,
    bias: Tensor | None,
    format: str,
    x_format: str,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], codes.shape[0]), dtype=torch.float32)


@op(f"quantized_lm_head(Tensor x, {_WEIGHT}, {_FORMATS}) -> Tensor", fake=_fake_lm_head)
def quantized_lm_head(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    x_scale: Tensor | None,
    bias: Tensor | None,
    format: str,
    x_format: str,
) -> Tensor:
    """Logits, left in fp32: llmc::lm_head."""
    return _product(x, codes, scales, zeros, x_scale, bias, format, x_format)


def _fake_embedding(
    ids: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, format: str, dtype: torch.dtype
) -> Tensor:
    return codes.new_empty((*ids.shape, codes.shape[1]), dtype=dtype)


@op(
    "quantized_embedding(Tensor ids, Tensor codes, Tensor scales, Tensor? zeros, str format, ScalarType dtype)"
    " -> Tensor",
    fake=_fake_embedding,
)
def quantized_embedding(
    ids: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, format: str, dtype: torch.dtype
) -> Tensor:
    """Rows of a quantized table, rounded to dtype. ids: [tokens]; often tied to quantized_lm_head's weight."""
    rows = None if zeros is None else zeros[ids]
    return weight_values(codes[ids], scales[ids], rows, format).to(dtype)
