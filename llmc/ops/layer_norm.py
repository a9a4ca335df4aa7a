"""llmc::layer_norm, alone and fused with the residual sum before it.

All arithmetic is in fp32, rounded once to x's dtype at the end.
"""

import torch
from torch import Tensor

from llmc.ops.registry import FROM_CAPTURED, WHEN_OPTIMIZED, like, op, per_element
from llmc.ops.rms_norm import weight_fits


@op(
    fake=like("x"),
    stages=FROM_CAPTURED,
    flops=per_element(7),
    rows=("x",),
    check=weight_fits,
    axes="x[* c!] weight[c!] bias[c!] -> [* c!]",
)
def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """y[c] = (x[c] - mean) / sqrt(variance + eps) · weight[c] + bias[c]. x: [..., channels]; weight, bias: [channels].

    Source: Ba, Kiros and Hinton 2016.
    """
    y = x.float()
    centred = y - y.mean(-1, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    y = y if weight is None else y * weight.float()
    return (y if bias is None else y + bias.float()).to(x.dtype)


@op(fake=like("x", "x"), stages=WHEN_OPTIMIZED, flops=per_element(8), rows=("x", "residual"), check=weight_fits)
def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """(layer_norm(s), s) with s = x + residual rounded to x's dtype."""
    total = (x.float() + residual.float()).to(x.dtype)
    return layer_norm(total, weight, bias, eps), total
