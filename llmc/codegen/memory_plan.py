"""Give every buffer an offset in one arena, so that buffers alive at the same time never overlap.

Sizes grow with T, with L, or not at all, and each of the three kinds has its own region: first the constant one,
then T times the token region, then L times the logit-row region. Within a region a plan for one row holds for any
number of rows. Placing the largest buffers first, each at the lowest free offset, is the greedy-by-size heuristic of
Pisarchyk and Lee 2020, "Efficient memory management for deep neural net inference".
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llmc.program import Affine, RowCount

ALIGNMENT = 64


@dataclass(frozen=True)
class Lifetime:
    """A buffer of `row_bytes` a row that holds data from launch `first` to launch `last`, both included."""

    rows: RowCount
    row_bytes: int
    first: int
    last: int


@dataclass(frozen=True)
class MemoryPlan:
    """Offsets in the order of the lifetimes; `unplanned` is what the buffers would take side by side."""

    offsets: tuple[Affine, ...]
    arena: Affine
    unplanned: Affine


def plan_memory(lifetimes: Sequence[Lifetime]) -> MemoryPlan:
    """Offsets are multiples of 64 bytes for every T and L."""
    planned: dict[int, int] = {}
    for rows in RowCount:
        planned |= _plan_region({i: life for i, life in enumerate(lifetimes) if life.rows is rows})
    ends = {rows: [planned[i] + _padded(x) for i, x in enumerate(lifetimes) if x.rows is rows] for rows in RowCount}
    sizes = {rows: max(ends[rows], default=0) for rows in RowCount}
    total = {rows: sum(_padded(x) for x in lifetimes if x.rows is rows) for rows in RowCount}
    before: dict[RowCount, dict[RowCount, int]] = {
        RowCount.ONE: {},
        RowCount.TOKENS: {RowCount.ONE: sizes[RowCount.ONE]},
        RowCount.LOGIT_ROWS: {RowCount.ONE: sizes[RowCount.ONE], RowCount.TOKENS: sizes[RowCount.TOKENS]},
    }
    offsets = tuple(_affine(before[x.rows] | {x.rows: planned[i]}) for i, x in enumerate(lifetimes))
    return MemoryPlan(offsets, _affine(sizes), _affine(total))


def _plan_region(lifetimes: dict[int, Lifetime]) -> dict[int, int]:
    """Offsets for one row of buffers of one kind, by number."""
    offsets: dict[int, int] = {}
    for index, life in sorted(lifetimes.items(), key=lambda item: (-_padded(item[1]), item[1].first, item[0])):
        occupied = sorted(
            (offsets[other], offsets[other] + _padded(lifetimes[other]))
            for other in offsets
            if lifetimes[other].first <= life.last and life.first <= lifetimes[other].last
        )
        offset = 0
        for start, end in occupied:
            if start - offset >= _padded(life):
                break
            offset = max(offset, end)
        offsets[index] = offset
    return offsets


def _padded(life: Lifetime) -> int:
    return -(-life.row_bytes // ALIGNMENT) * ALIGNMENT


def _affine(sizes: Mapping[RowCount, int]) -> Affine:
    return Affine(*(sizes.get(rows, 0) for rows in (RowCount.ONE, RowCount.TOKENS, RowCount.LOGIT_ROWS)))
