"""Which elements of a weight are kept, given how much each matters: any of them, or so many of each few columns."""

from __future__ import annotations

import torch
from torch import Tensor

from llmc.formats.sparsity import SparseScheme


def kept_elements(importance: Tensor, scheme: SparseScheme, *, by_row: bool) -> Tensor:
    """Of importance [out, in], bool: all but the least important ones. Ties go to the first.

    by_row: each row keeps as many as the others (Wanda); else the least of the whole matrix go (magnitude). A pattern
    (kept, of) keeps as many of each run of columns.
    """
    if scheme.pattern is not None:
        kept, of = scheme.pattern
        return _largest(importance.unflatten(1, (-1, of)), kept).flatten(1)
    if by_row:
        columns = importance.shape[1]
        return _largest(importance, columns - round(scheme.ratio * columns))
    flat = importance.reshape(1, -1)
    return _largest(flat, flat.shape[1] - round(scheme.ratio * flat.shape[1])).view_as(importance)


def _largest(importance: Tensor, count: int) -> Tensor:
    """The `count` largest along the last axis, the first of equal ones."""
    if count == 0:
        return torch.zeros_like(importance, dtype=torch.bool)
    # The count-th largest; then as many of those that equal it as are wanted, from the first on.
    threshold = importance.kthvalue(importance.shape[-1] - count + 1, dim=-1, keepdim=True).values
    above, equal = importance > threshold, importance == threshold
    wanted = count - above.sum(-1, keepdim=True)
    return above | (equal & (equal.cumsum(-1) <= wanted))
