"""llmc::embedding — y[t] = weight[ids[t]]."""

from __future__ import annotations

import torch
from torch import Tensor

from llmc.ops.registry import FROM_CAPTURED, LOOKUP, op, per_element


@op(
    fake=lambda a: a.weight.new_empty((*a.ids.shape, a.weight.shape[1]), dtype=a.dtype or a.weight.dtype),
    stages=FROM_CAPTURED,
    flops=per_element(0),
    table="weight",
    takes=LOOKUP,
)
def embedding(ids: Tensor, weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Look up rows of a table. ids: [tokens], integer; weight: [entries, channels]; returns [tokens, channels], rounded
    to dtype where that is not None."""
    return weight[ids].to(dtype or weight.dtype)
