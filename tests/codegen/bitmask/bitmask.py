"""llmc::bitmask — a weight that is mostly zeros, stored as which elements are not, and those."""

from __future__ import annotations

import torch
from torch import Tensor

from llmc.graph.op_record import Part
from llmc.ops.registry import FROM_CAPTURED, op, per_element


@op(
    fake=lambda a: a.mask.new_empty((a.mask.shape[0], 32 * a.mask.shape[1]), dtype=a.dtype),
    stages=FROM_CAPTURED,
    flops=per_element(0),
    rows=("mask", "values"),
    part=Part.STORAGE,
)
def bitmask(mask: Tensor, values: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight [out, 32 · words]. mask: [out, words], int32, a bit for each element, the lowest first. values: [out,
    most], bf16: the elements of each row whose bit is set, in order; what follows them does not matter."""
    bits = (mask[:, :, None] >> torch.arange(32)) & 1
    kept = bits.flatten(1).bool()
    places = (kept.cumsum(1) - 1).clamp_min(0)
    return torch.where(kept, values.float().gather(1, places), 0.0).to(dtype)
