"""llmc::embedding — y[t] = weight[ids[t]]."""

import torch
from torch import Tensor

from llmc.ops.registry import FROM_CAPTURED, LOOKUP, like, op, per_element


@op(
    fake=lambda a: a.weight.new_empty((*a.ids.shape, a.weight.shape[1]), dtype=a.dtype or a.weight.dtype),
    stages=FROM_CAPTURED,
    flops=per_element(0),
    table="weight",
    takes=LOOKUP,
    axes="weight[v c] -> [* c]",
)
def embedding(ids: Tensor, weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Look up rows of a table. ids: [tokens], integer; weight: [entries, channels]; returns [tokens, channels], rounded
    to dtype where that is not None."""
    return weight[ids].to(dtype or weight.dtype)


@op(fake=like("ids"), stages=FROM_CAPTURED, flops=per_element(3), rows=("ids",))
def rank_rows(ids: Tensor, first: Tensor, rows: int) -> Tensor:
    """Return the rows of a rank's part of a table for ids: id - first, and `rows` for ids of other ranks, whose row is
    zero. ids: [tokens], int32. first: [1], int32, the id of the part's first row; rows: number of rows of the part,
    without the row of zeros."""
    own = ids - first.to(ids.dtype)
    return torch.where((own >= 0) & (own < rows), own, rows)
