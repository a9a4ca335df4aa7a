"""llmc::rms_norm, alone and fused with the residual sum before it.

All arithmetic is in fp32, rounded once to x's dtype at the end.
"""

import torch
from torch import Tensor

from llmc.graph.op_record import OpCall
from llmc.ops.registry import FROM_CAPTURED, WHEN_OPTIMIZED, like, op, per_element


def weight_fits(call: OpCall) -> str | None:
    """Return why a norm's weight does not fit its rows, or None."""
    x, weight = call.shape("x"), call.shape("weight")
    return None if not weight or weight == x[-1:] else f"weight {weight} does not fit x {x}"


@op(
    fake=like("x"),
    stages=FROM_CAPTURED,
    flops=per_element(4),
    rows=("x",),
    check=weight_fits,
    axes="x[* c~] weight[c] -> [* c]",
)
def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """y[c] = x[c] / sqrt(mean_c(x[c]²) + eps) · weight[c]. x: [..., channels]; weight: [channels].

    Source: Zhang and Sennrich 2019.
    """
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return (y if weight is None else y * weight.float()).to(x.dtype)


@op(fake=like("x", "x"), stages=WHEN_OPTIMIZED, flops=per_element(5), rows=("x", "residual"), check=weight_fits)
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(s), s) with s = x + residual in x's dtype: the norm sees what the next layer adds to."""
    total = (x.float() + residual.float()).to(x.dtype)
    return rms_norm(total, weight, eps), total
