"""llmc::norm_linear, norm_gated_linear, norm_quantized_linear and norm_quantized_gated_linear: products of normed rows.

For kernels that norm on the way. Only lowering for GPUs makes them (codegen/triton/fuse_norms.py); no pass does.
"""

from __future__ import annotations

from torch import Tensor

from llmc.ops.linear import gated_linear, linear
from llmc.ops.norm import rms_norm
from llmc.ops.quantized_linear import quantized_gated_linear, quantized_linear
from llmc.ops.registry import op

_CODES = "Tensor codes, Tensor scales, Tensor? zeros, Tensor? x_scale, Tensor? bias"
_FORMATS = "str format, str x_format"
_NORM = "Tensor? norm, float eps"


def _fake_norm_linear(x: Tensor, norm: Tensor | None, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@op(
    "norm_linear(Tensor x, Tensor? norm, float eps, Tensor weight, Tensor? bias) -> Tensor",
    fake=_fake_norm_linear,
)
def norm_linear(x: Tensor, norm: Tensor | None, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
    """linear(rms_norm(x, norm, eps), weight, bias). x: [rows, channels]; norm: [channels]; weight: [out, channels]."""
    return linear(rms_norm(x, norm, eps), weight, bias)


def _fake_norm_gated_linear(
    x: Tensor, norm: Tensor | None, eps: float, weight: Tensor, bias: Tensor | None, activation: str
) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0] // 2))


@op(
    "norm_gated_linear(Tensor x, Tensor? norm, float eps, Tensor weight, Tensor? bias, str activation) -> Tensor",
    fake=_fake_norm_gated_linear,
)
def norm_gated_linear(
    x: Tensor, norm: Tensor | None, eps: float, weight: Tensor, bias: Tensor | None, activation: str
) -> Tensor:
    """gated_linear(rms_norm(x, norm, eps), weight, bias, activation), with gated_linear's shapes."""
    return gated_linear(rms_norm(x, norm, eps), weight, bias, activation)


def _fake_norm_quantized_linear(
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
    norm: Tensor | None,
    eps: float,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], codes.shape[0]))


@op(
    f"norm_quantized_linear(Tensor x, {_CODES}, Tensor? residual, str activation, float scale, {_FORMATS}, {_NORM})"
    " -> Tensor",
    fake=_fake_norm_quantized_linear,
)
def norm_quantized_linear(
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
    norm: Tensor | None,
    eps: float,
) -> Tensor:
    """quantized_linear(rms_norm(x, norm, eps), …), with quantized_linear's shapes; norm: [channels]."""
    normed = rms_norm(x, norm, eps)
    return quantized_linear(normed, codes, scales, zeros, x_scale, bias, residual, activation, scale, format, x_format)


def _fake_norm_quantized_gated_linear(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    x_scale: Tensor | None,
    bias: Tensor | None,
    activation: str,
    format: str,
    x_format: str,
    norm: Tensor | None,
    eps: float,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], codes.shape[0] // 2))


@op(
    f"norm_quantized_gated_linear(Tensor x, {_CODES}, str activation, {_FORMATS}, {_NORM}) -> Tensor",
    fake=_fake_norm_quantized_gated_linear,
)
def norm_quantized_gated_linear(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    x_scale: Tensor | None,
    bias: Tensor | None,
    activation: str,
    format: str,
    x_format: str,
    norm: Tensor | None,
    eps: float,
) -> Tensor:
    """quantized_gated_linear(rms_norm(x, norm, eps), …), with quantized_gated_linear's shapes; norm: [channels]."""
    normed = rms_norm(x, norm, eps)
    return quantized_gated_linear(normed, codes, scales, zeros, x_scale, bias, activation, format, x_format)
