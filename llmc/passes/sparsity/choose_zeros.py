"""Which elements of a weight are kept, given how much each matters: any of them, or so many of each few columns."""

import torch
from torch import Tensor

from llmc.formats.sparsity import SparseScheme

_HALF = 16  # bits


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
    flat = importance.flatten()
    return _largest_of_all(flat, len(flat) - round(scheme.ratio * len(flat))).view_as(importance)


def _largest(importance: Tensor, count: int) -> Tensor:
    """The `count` largest along the last axis, the first of equal ones."""
    if count == 0:
        return torch.zeros_like(importance, dtype=torch.bool)
    # The count-th largest; then as many of those that equal it as are wanted, from the first on.
    threshold = importance.kthvalue(importance.shape[-1] - count + 1, dim=-1, keepdim=True).values
    above, equal = importance > threshold, importance == threshold
    wanted = count - above.sum(-1, keepdim=True)
    return above | (equal & (equal.cumsum(-1) <= wanted))


def _largest_of_all(importance: Tensor, count: int) -> Tensor:
    """The `count` largest of importance [elements], fp32 and not negative, the first of equal ones.

    By counting: the bits of such numbers are in the numbers' order, so that two histograms, of their upper and lower
    halves, find the count-th largest. That is faster than selecting or sorting.
    """
    if count == 0:
        return torch.zeros_like(importance, dtype=torch.bool)
    bits = importance.view(torch.int32)
    upper = bits >> _HALF
    half, wanted = _place(upper, count)
    lower, wanted = _place(bits[upper == half] & ((1 << _HALF) - 1), wanted)
    threshold = half << _HALF | lower
    kept = bits > threshold
    kept[(bits == threshold).nonzero()[:wanted]] = True
    return kept


def _place(numbers: Tensor, count: int) -> tuple[int, int]:
    """The count-th largest of some numbers of 16 bits, and how many of those that equal it are among the largest."""
    found = torch.bincount(numbers, minlength=1 << _HALF)
    least = found.flip(0).cumsum(0).flip(0)  # how many are as large or larger
    place = int((least >= count).nonzero().max())
    return place, count - int(least[place] - found[place])
