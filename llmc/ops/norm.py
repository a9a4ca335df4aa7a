"""llmc::rms_norm, llmc::layer_norm, and both fused with the residual sum before them.

All arithmetic is in fp32, rounded once to x's dtype at the end.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmc.graph.op_record import OpCall
from llmc.ops.registry import FROM_CAPTURED, WHEN_OPTIMIZED, like, op, per_element


def _normalized_rms(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight.float()


def _normalized_layer(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    y = y if weight is None else y * weight.float()
    return y if bias is None else y + bias.float()


def _weight_fits(call: OpCall) -> str | None:
    x, weight = call.shape("x"), call.shape("weight")
    return None if not weight or weight == x[-1:] else f"weight {weight} does not fit x {x}"


@op(fake=like("x"), stages=FROM_CAPTURED, flops=per_element(4), rows=("x",), check=_weight_fits)
def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """y[c] = x[c] / sqrt(mean_c(x[c]²) + eps) · weight[c]. x: [..., channels]; weight: [channels].

    Source: Zhang and Sennrich 2019.
    """
    return _normalized_rms(x.float(), weight, eps).to(x.dtype)


@op(fake=like("x"), stages=FROM_CAPTURED, flops=per_element(7), rows=("x",), check=_weight_fits)
def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """y[c] = (x[c] - mean) / sqrt(variance + eps) · weight[c] + bias[c]. x: [..., channels]; weight, bias: [channels].

    Source: Ba, Kiros and Hinton 2016.
    """
    return _normalized_layer(x.float(), weight, bias, eps).to(x.dtype)


@op(fake=like("x", "x"), stages=WHEN_OPTIMIZED, flops=per_element(5), rows=("x", "residual"), check=_weight_fits)
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(s), s) with s = x + residual in x's dtype: the norm sees what the next layer adds to."""
    total = (x.float() + residual.float()).to(x.dtype)
    return _normalized_rms(total.float(), weight, eps).to(x.dtype), total


@op(fake=like("x", "x"), stages=WHEN_OPTIMIZED, flops=per_element(8), rows=("x", "residual"), check=_weight_fits)
def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """(layer_norm(s), s) with s = x + residual rounded to x's dtype."""
    total = (x.float() + residual.float()).to(x.dtype)
    return _normalized_layer(total.float(), weight, bias, eps).to(x.dtype), total
