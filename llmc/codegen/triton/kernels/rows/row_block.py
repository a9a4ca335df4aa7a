"""The block that a program of a memory-bound kernel handles at a time: a few short rows, or a part of a long one."""

from dataclasses import dataclass

import triton

_ELEMENTS_PER_PROGRAM = 1024
_LONGEST_WHOLE_ROW = 8192
_ELEMENTS_PER_WARP = 256


@dataclass(frozen=True)
class RowBlock:
    """rows: of a program. columns: at a time, a power of two. num_warps: 8 to 16 elements a thread."""

    rows: int
    columns: int
    num_warps: int


def row_block(columns: int, most_rows: int = 16) -> RowBlock:
    """The block for rows of that many columns. A row longer than a block is walked block by block."""
    block = triton.next_power_of_2(columns) if columns <= _LONGEST_WHOLE_ROW else _LONGEST_WHOLE_ROW // 2
    rows = max(1, min(most_rows, _ELEMENTS_PER_PROGRAM // block))
    return RowBlock(rows, block, max(1, min(16, rows * block // _ELEMENTS_PER_WARP)))
