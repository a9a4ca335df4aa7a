"""Device code for weights without their zeros: a tile of one, its elements put into their places in registers.

As codegen/triton/mask_rows.py lays them out: of each row bytes of mask, bit i of byte b for column 8·b + i, and where
its elements begin. A thread takes a byte: it counts its bits, a scan over the bytes of a row says where its elements
begin, and each bit moves on to the next. The tile is that of a dense weight, element for element. Its threads hold
other elements of it than those that load a dense tile, so that a sum over them may differ in its last bits.
"""

import triton
import triton.language as tl

# Bytes of mask that are counted at a time on the way to a part of a row.
_COUNTED = tl.constexpr(128)


@triton.jit
def expand_rows_kernel(
    values_ptr: tl.tensor,
    masks_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    y_ptr: tl.tensor,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    OUT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Program i: the i-th ROWS rows with their zeros, each WIDTH elements from the next. Moves the weight, sparse and
    dense."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    last = tl.minimum(row, OUT - 1)
    first = first_elements(masks_ptr, starts_ptr, last, 0, COLUMNS)
    for start in range(0, WIDTH, BLOCK):
        column = start + tl.arange(0, BLOCK)[None, :]
        tile, first = sparse_tile(values_ptr, masks_ptr, first, last, start, COLUMNS, BLOCK)
        tl.store(y_ptr + row[:, None] * WIDTH + column, tile, mask=(row < OUT)[:, None] & (column < WIDTH))


@triton.jit
def first_elements(
    masks_ptr: tl.tensor, starts_ptr: tl.tensor, row: tl.tensor, column: tl.tensor, IN: tl.constexpr
) -> tl.tensor:
    """Where the elements of rows [ROWS] begin from a column on, int64. column: a multiple of 8."""
    ROW_BYTES: tl.constexpr = (IN + 63) // 64 * 8
    first = tl.load(starts_ptr + row)
    mask_row = masks_ptr + row.to(tl.int64)[:, None] * ROW_BYTES
    end = tl.minimum(column // 8, ROW_BYTES)
    for start in range(0, end, _COUNTED):
        byte = start + tl.arange(0, _COUNTED)[None, :]
        bits = tl.load(mask_row + byte, mask=(byte < end) & (row >= 0)[:, None], other=0)
        first += tl.sum(_bit_counts(bits.to(tl.int32)), axis=1)
    return first


@triton.jit
def sparse_tile(
    values_ptr: tl.tensor,
    masks_ptr: tl.tensor,
    first: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    IN: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Load BLOCK columns from `column` on of the rows: [ROWS, BLOCK], and where the next column's elements begin.

    first: where the elements of `column` begin.
    """
    ROW_BYTES: tl.constexpr = (IN + 63) // 64 * 8
    byte = column // 8 + tl.arange(0, BLOCK // 8)[None, :]
    bits = tl.load(
        masks_ptr + row.to(tl.int64)[:, None] * ROW_BYTES + byte, mask=(byte < ROW_BYTES) & (row >= 0)[:, None], other=0
    ).to(tl.int32)
    counts = _bit_counts(bits)
    ends = tl.cumsum(counts, axis=1)
    at, row_ptr = ends - counts, values_ptr + first[:, None]
    e0, at = _element(row_ptr, at, bits, 0)
    e1, at = _element(row_ptr, at, bits, 1)
    e2, at = _element(row_ptr, at, bits, 2)
    e3, at = _element(row_ptr, at, bits, 3)
    e4, at = _element(row_ptr, at, bits, 4)
    e5, at = _element(row_ptr, at, bits, 5)
    e6, at = _element(row_ptr, at, bits, 6)
    e7, at = _element(row_ptr, at, bits, 7)
    even = tl.join(tl.join(e0, e4), tl.join(e2, e6))
    odd = tl.join(tl.join(e1, e5), tl.join(e3, e7))
    # The axes are those of a column's bits, the highest first.
    return tl.join(even, odd).reshape(row.shape[0], BLOCK), first + tl.max(ends, axis=1)


@triton.jit
def _element(row_ptr: tl.tensor, at: tl.tensor, bits: tl.tensor, BIT: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """The elements of one bit, zero where it is not set; and where those of the next one are."""
    is_kept = (bits >> BIT) & 1
    return tl.load(row_ptr + at, mask=is_kept != 0, other=0), at + is_kept


@triton.jit
def _bit_counts(bits: tl.tensor) -> tl.tensor:
    """The number of bits set in each byte, int32."""
    pairs = bits - ((bits >> 1) & 0x55)
    fours = (pairs & 0x33) + ((pairs >> 2) & 0x33)
    return (fours + (fours >> 4)) & 0x0F
