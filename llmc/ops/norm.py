"""llmc::rms_norm, llmc::layer_norm, and both fused with the residual sum before them.

All arithmetic is in fp32, rounded once to x's dtype at the end.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmc.ops.registry import op


def _normalized_rms(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight.float()


def _normalized_layer(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    y = y if weight is None else y * weight.float()
    return y if bias is None else y + bias.float()


def _fake_rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return torch.empty_like(x)


@op("rms_norm(Tensor x, Tensor? weight, float eps) -> Tensor", fake=_fake_rms_norm)
def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """y[c] = x[c] / sqrt(mean_c(x[c]²) + eps) · weight[c]. x: [..., channels]; weight: [channels].

    Source: Zhang and Sennrich 2019.
    """
    return _normalized_rms(x.float(), weight, eps).to(x.dtype)


def _fake_layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    return torch.empty_like(x)


@op("layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps) -> Tensor", fake=_fake_layer_norm)
def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """y[c] = (x[c] - mean) / sqrt(variance + eps) · weight[c] + bias[c]. x: [..., channels]; weight, bias: [channels].

    Source: Ba, Kiros and Hinton 2016.
    """
    return _normalized_layer(x.float(), weight, bias, eps).to(x.dtype)


def _fake_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


@op(
    "add_rms_norm(Tensor x, Tensor residual, Tensor? weight, float eps) -> (Tensor, Tensor)",
    fake=_fake_add_rms_norm,
)
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(s), s) with s = x + residual in x's dtype: the norm sees what the next layer adds to."""
    total = (x.float() + residual.float()).to(x.dtype)
    return _normalized_rms(total.float(), weight, eps).to(x.dtype), total


def _fake_add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


@op(
    "add_layer_norm(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor)",
    fake=_fake_add_layer_norm,
)
def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """(layer_norm(s), s) with s = x + residual rounded to x's dtype."""
    total = (x.float() + residual.float()).to(x.dtype)
    return _normalized_layer(total.float(), weight, bias, eps).to(x.dtype), total
