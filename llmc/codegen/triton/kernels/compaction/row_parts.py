"""Parts of the rows that may leave, one for each program, and the moments of numbers of rows over all parts."""

import triton
import triton.language as tl

from llmc.codegen.triton.kernels.agreed_sums import sum_of_products


@triton.jit
def part_of_rows(
    compaction_ptr: tl.tensor,
    part: tl.tensor,
    first: tl.tensor,
    RECENT: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Where parts of the rows that may leave start, and where they end. Empty ones end where they start.

    first: the first row that may leave.
    """
    last = tl.load(compaction_ptr) - RECENT
    share = tl.cdiv(tl.cdiv(tl.maximum(last - first, 0), ROWS), PARTS) * ROWS
    start = first + part * share
    return start, tl.maximum(tl.minimum(start + share, last), start)


@triton.jit
def joined_moments(
    mean: tl.tensor, square: tl.tensor, done: tl.tensor, x: tl.tensor, present: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """Mean and sum of squares about it of `done` numbers, and of those of x that are present: along the first axis.

    Source: Chan, Golub and LeVeque 1979.
    """
    count = tl.sum(present.to(tl.float32), 0)
    own = tl.sum(tl.where(present, x, 0.0), 0) / count
    off = tl.where(present, x - own, 0.0)
    away = own - mean
    share = count / (done + count)
    return mean + away * share, square + sum_of_products(off, off, 0) + away * away * (done * share)


@triton.jit
def joined_parts(
    means: tl.tensor, squares: tl.tensor, counts: tl.tensor, count: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """Mean and sum of squares about it of all parts together, from those of each part. count: sum of counts."""
    mean = sum_of_products(means, counts, 0) / count
    off = means - mean
    return mean, tl.sum(squares, 0) + sum_of_products(off * off, counts, 0)
