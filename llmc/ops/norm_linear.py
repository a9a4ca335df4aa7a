"""llmc::norm_linear and llmc::norm_gated_linear: a matrix product of RMS-normed rows, for kernels that norm on the way.

Only lowering for GPUs makes them (codegen/triton/fuse_norms.py); no pass does.
"""

from __future__ import annotations

from torch import Tensor

from llmc.ops.linear import gated_linear, linear
from llmc.ops.norm import rms_norm
from llmc.ops.registry import op


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
