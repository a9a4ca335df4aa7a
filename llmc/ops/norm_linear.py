"""llmc::norm_linear, norm_gated_linear, norm_quantized_linear and norm_quantized_gated_linear: products of normed rows.

For kernels that norm on the way. Only lowering for GPUs makes them (codegen/triton/fuse_norms.py); no pass does.
"""

from __future__ import annotations

from torch import Tensor

from llmc.ops.linear import fits, gated_linear, linear
from llmc.ops.norm import rms_norm
from llmc.ops.quantized_linear import quantized_gated_linear, quantized_linear
from llmc.ops.registry import IN_NO_GRAPH, channels_of, matrix_product, op


@op(
    fake=channels_of("weight"),
    stages=IN_NO_GRAPH,
    flops=matrix_product("weight"),
    rows=("x",),
    check=fits("weight"),
)
def norm_linear(x: Tensor, norm: Tensor | None, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
    """linear(rms_norm(x, norm, eps), weight, bias). x: [rows, channels]; norm: [channels]; weight: [out, channels]."""
    return linear(rms_norm(x, norm, eps), weight, bias)


@op(
    fake=channels_of("weight", rows=2),
    stages=IN_NO_GRAPH,
    flops=matrix_product("weight"),
    rows=("x",),
    check=fits("weight"),
)
def norm_gated_linear(
    x: Tensor, norm: Tensor | None, eps: float, weight: Tensor, bias: Tensor | None, activation: str
) -> Tensor:
    """gated_linear(rms_norm(x, norm, eps), weight, bias, activation), with gated_linear's shapes."""
    return gated_linear(rms_norm(x, norm, eps), weight, bias, activation)


@op(
    fake=channels_of("codes"),
    stages=IN_NO_GRAPH,
    flops=matrix_product("codes"),
    rows=("x", "residual"),
    check=fits("codes"),
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


@op(
    fake=channels_of("codes", rows=2),
    stages=IN_NO_GRAPH,
    flops=matrix_product("codes"),
    rows=("x",),
    check=fits("codes"),
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
