"""Matrix products over quantized weights, and the embedding that may share them.

Weights are codes, scales and zeros as in weight_codes.py; nothing is rounded between the values that codes stand for
and the fp32 sum. x_format: "none" takes x as it is; "int8" and "fp8" round each token first (token_codes.py), with the
static scale x_scale: [1] or, without one, a scale of the token's own. The rest is as in linear.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmc.ops.activation import apply_activation
from llmc.ops.linear import fits
from llmc.ops.registry import WHEN_OPTIMIZED, channels_of, matrix_product, op, per_element
from llmc.ops.token_codes import token_codes, token_values
from llmc.ops.weight_codes import weight_values


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


@op(
    fake=channels_of("codes"),
    stages=WHEN_OPTIMIZED,
    flops=matrix_product("codes"),
    rows=("x", "residual"),
    check=fits("codes"),
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


@op(
    fake=channels_of("codes", rows=2),
    stages=WHEN_OPTIMIZED,
    flops=matrix_product("codes"),
    rows=("x",),
    check=fits("codes"),
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


@op(
    fake=channels_of("codes", dtype=torch.float32),
    stages=WHEN_OPTIMIZED,
    flops=matrix_product("codes"),
    rows=("x",),
    check=fits("codes"),
)
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


@op(
    fake=lambda a: a.codes.new_empty((*a.ids.shape, a.codes.shape[1]), dtype=a.dtype),
    stages=WHEN_OPTIMIZED,
    flops=per_element(1),
    table="codes",
)
def quantized_embedding(
    ids: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, format: str, dtype: torch.dtype
) -> Tensor:
    """Rows of a quantized table, rounded to dtype. ids: [tokens]; often tied to quantized_lm_head's weight."""
    rows = None if zeros is None else zeros[ids]
    return weight_values(codes[ids], scales[ids], rows, format).to(dtype)
