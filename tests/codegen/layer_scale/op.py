"""llmc::layer_scale — each channel times a number of its own. Source: Touvron et al. 2021, "CaiT"."""

from __future__ import annotations

from torch import Tensor

from llmc.ops.registry import WHEN_OPTIMIZED, like, op, per_element


@op(fake=like("x"), stages=WHEN_OPTIMIZED, flops=per_element(1), rows=("x",))
def layer_scale(x: Tensor, weight: Tensor) -> Tensor:
    """y[t, c] = x[t, c] · weight[c], rounded once. x: [tokens, channels]; weight: [channels]."""
    return (x.float() * weight.float()).to(x.dtype)
