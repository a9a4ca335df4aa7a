"""Choose the kept elements of a weight by importance: anywhere, or a fixed number in each run of columns."""

import torch
from torch import Tensor

from llmc.formats.sparsity import SparseScheme

_HALF = 16  # bits


def kept_elements(importance: Tensor, scheme: SparseScheme, *, by_row: bool) -> Tensor:
    """Mask of the kept elements, bool, for importance [out, in]: all except the least important ones. Ties go to the
    first.

    by_row: all rows keep the same number (Wanda); otherwise the least of the whole matrix are removed (magnitude). A
    pattern (kept, of) keeps `kept` of each run of `of` columns.
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
    # Mask of the `count` largest elements; ties with the smallest of them go to the first.
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
    counts = torch.bincount(numbers, minlength=1 << _HALF)
    least = counts.flip(0).cumsum(0).flip(0)  # how many are as large or larger
    place = int((least >= count).nonzero().max())
    return place, count - int(least[place] - counts[place])
