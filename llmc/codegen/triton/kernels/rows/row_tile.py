"""How rows of a memory-bound kernel are cut into tiles: a few short rows a program, or a long row in blocks."""

from __future__ import annotations

from dataclasses import dataclass

_ELEMENTS_PER_PROGRAM = 1024
_LONGEST_WHOLE_ROW = 8192
_ELEMENTS_PER_WARP = 256


@dataclass(frozen=True)
class RowTile:
    """rows of a program; block: columns at a time, a power of two; num_warps: 8 to 16 elements a thread."""

    rows: int
    block: int
    num_warps: int


def row_tile(columns: int, most_rows: int = 16) -> RowTile:
    """The tile for rows of that many columns. A row longer than a block is walked block by block."""
    block = _power_of_two(columns) if columns <= _LONGEST_WHOLE_ROW else _LONGEST_WHOLE_ROW // 2
    rows = max(1, min(most_rows, _ELEMENTS_PER_PROGRAM // block))
    return RowTile(rows, block, max(1, min(16, rows * block // _ELEMENTS_PER_WARP)))


def _power_of_two(count: int) -> int:
    """The smallest power of two that is not less than the count."""
    return 1 << (count - 1).bit_length()
