"""llmc::embedding — y[t] = weight[ids[t]]."""

from __future__ import annotations

from torch import Tensor

from llmc.ops.registry import FROM_CAPTURED, op, per_element


@op(
    fake=lambda a: a.weight.new_empty((*a.ids.shape, a.weight.shape[1])),
    stages=FROM_CAPTURED,
    flops=per_element(0),
    table="weight",
)
def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """Look up rows of a table. ids: [tokens], integer; weight: [entries, channels]; returns [tokens, channels]."""
    return weight[ids]
