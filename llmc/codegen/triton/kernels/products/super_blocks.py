"""Device code of coded_narrow.py for GGUF's K-quants: 256 channels share a float of scales, and one of minima.

A lane loads 64 neighbouring channels of a row, so that the second plane of a format of six bits also fills a load of 16
bytes, and the steps of the lane's groups are neighbours. It multiplies them in two halves, each like a turn.

Several tokens fill the columns of a matrix instruction, and operands are scaled before it (folded_scales.py). A single
token needs one column of eight. It gives two columns to each lane of a row, and x is zero in all other lanes of these
columns. A lane thus receives the sums of its own groups, whose scales it has, and scales them in fp32.
"""

import triton
import triton.language as tl

from llmc.codegen.triton.kernels.interpreted import INTERPRETED
from llmc.codegen.triton.kernels.products.code_operands import operand_offset, row_operands
from llmc.codegen.triton.kernels.products.folded_scales import code_middle
from llmc.codegen.triton.kernels.products.format_facts import (
    above_bits,
    least_step,
    record_of,
    step_bits,
    step_row_bytes,
)
from llmc.codegen.triton.kernels.products.matrix_words import words_of_rows
from llmc.codegen.triton.kernels.products.narrow_turns import operand_of_step, step_sums
from llmc.codegen.triton.kernels.products.operand_tiles import read_tile

_CHANNELS = tl.constexpr(256)
# 1.5·2²³: its bits, with a small integer in the low ones, are those of the sum.
_INTEGER_BITS, _INTEGER = tl.constexpr(0x4B400000), tl.constexpr(12582912.0)


@triton.constexpr_function
def is_in_blocks(format: str, columns: int, floats: int) -> bool:
    """Whether a row consists of blocks of 256 channels. floats: of a row's scales."""
    record = record_of(format)
    return bool(record.steps is not None and record.planes[0] == 4 and columns == 256 * floats)


@triton.constexpr_function
def _groups(format: str) -> int:
    """Groups of a lane in a block."""
    return 64 // int(record_of(format).group)


@triton.constexpr_function
def _code_words(format: str) -> int:
    """Words of a lane's codes in a block."""
    return int(8 + 2 * above_bits(format))


@triton.constexpr_function
def _step_values(format: str) -> int:
    """Words that the steps of a lane's groups in a block are loaded as."""
    return 1 if record_of(format).step_field_bits == 8 else 2


@triton.jit
def load_block(
    code_row: tl.tensor,
    row: tl.tensor,
    scales_ptr: tl.tensor,
    minima_ptr: tl.tensor,
    steps_ptr: tl.tensor,
    block: tl.tensor,
    inside: tl.tensor,
    IN: tl.constexpr,
    GROUPS: tl.constexpr,
    FORMAT: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    WARPS: tl.constexpr,
) -> tl.tuple:
    """A lane's values of a row's block: words of the first plane, then of the second one, steps, the scale, and the
    minimum if there is one. code_row: of the lane's first codes in the row."""
    column = tl.arange(0, 32 * WARPS) % 4
    found = words_of_rows(code_row + block * 128, inside, 4, IS_WHOLE, "evict_first")
    found = found + words_of_rows(code_row + (block * 128 + 16), inside, 4, IS_WHOLE, "evict_first")
    if above_bits(FORMAT) > 0:
        WORDS: tl.constexpr = 2 * above_bits(FORMAT)
        place = code_row + (column * (4 * WORDS - 32) + IN // 2 + block * (16 * WORDS))
        found = found + words_of_rows(place, inside, WORDS, IS_WHOLE, "evict_first")
    steps = steps_ptr + row * step_row_bytes(FORMAT, GROUPS)
    if _step_values(FORMAT) == 1:
        found = found + words_of_rows(steps + (block * 16 + column * 4), inside, 1, IS_WHOLE, "")
    else:
        # The lane's three bytes lie in one word, or begin in one and end in the next.
        for i in tl.static_range(2):
            place = steps + (block * 12 + (column * 3 + 2 * i) // 4 * 4)
            found = found + words_of_rows(place, inside, 1, IS_WHOLE, "")
    place = row * (IN // _CHANNELS) + block
    found += (read_tile(scales_ptr + place, inside, not IS_WHOLE),)
    if minima_ptr is not None:
        found += (read_tile(minima_ptr + place, inside, not IS_WHOLE),)
    return found


@triton.jit
def _steps(values: tl.tuple, FIRST: tl.constexpr, FORMAT: tl.constexpr) -> tl.tuple:
    """The steps of a lane's groups, fp32: a scale's and a minimum's of each group, or only the scale's."""
    AT: tl.constexpr = FIRST + _code_words(FORMAT)
    BITS: tl.constexpr = step_bits(FORMAT)
    LEAST: tl.constexpr = least_step(FORMAT)
    tl.static_assert(LEAST == 0 or not record_of(FORMAT).has_minimum, "steps of minima begin at 0")
    word = values[AT]
    if _step_values(FORMAT) == 2:
        both = (word.to(tl.int64) & 0xFFFFFFFF) | (values[AT + 1].to(tl.int64) << 32)
        word = (both >> (tl.arange(0, word.shape[0]) % 4 * 24 % 32)).to(tl.int32)
    found: tl.tuple = ()
    for i in tl.static_range(_groups(FORMAT) * (1 + record_of(FORMAT).has_minimum)):
        found += (_small_float(word >> (BITS * i), (1 << BITS) - 1, LEAST),)
    return found


@triton.constexpr_function
def _masked(mask: int) -> str:
    return f"lop3.b32 $0, $1, {mask}, 0x4b400000, 0xea;"


@triton.jit
def _small_float(word: tl.tensor, MASK: tl.constexpr, LEAST: tl.constexpr) -> tl.tensor:
    """fp32 of the integer in a word's bits, plus LEAST."""
    if INTERPRETED:
        bits = (word & MASK) | _INTEGER_BITS
    else:
        # The compiler would take the bits apart first.
        bits = tl.inline_asm_elementwise(_masked(MASK), "=r,r", [word], dtype=tl.int32, is_pure=True, pack=1)
    return bits.to(tl.float32, bitcast=True) - (_INTEGER - LEAST)


@triton.jit
def folded_rows(
    chunk: tl.tuple,
    BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    EACH: tl.constexpr,
    ROWS: tl.constexpr,
    FORMAT: tl.constexpr,
) -> tl.tuple:
    """The values of half a BLOCK of a chunk for narrow_turns.add_folded: each row's words, then scales, with shifts.
    EACH: values of a row's block."""
    found: tl.tuple = ()
    for i in tl.static_range(ROWS):
        found = found + _half_words(chunk, (BLOCK * ROWS + i) * EACH, HALF, FORMAT)
        found = found + _scales_and_shifts(chunk, (BLOCK * ROWS + i) * EACH, HALF, FORMAT)
    return found


@triton.jit
def _half_words(values: tl.tuple, FIRST: tl.constexpr, HALF: tl.constexpr, FORMAT: tl.constexpr) -> tl.tuple:
    """The words of half a row's block, whose values begin at FIRST, as those of a turn."""
    ABOVE: tl.constexpr = above_bits(FORMAT)
    AT: tl.constexpr = FIRST + 8 + ABOVE * HALF
    return values[FIRST + 4 * HALF : FIRST + 4 * HALF + 4] + values[AT : AT + ABOVE]


@triton.jit
def _scales_and_shifts(values: tl.tuple, FIRST: tl.constexpr, HALF: tl.constexpr, FORMAT: tl.constexpr) -> tl.tuple:
    AT: tl.constexpr = FIRST + _code_words(FORMAT) + _step_values(FORMAT)
    steps = _steps(values, FIRST, FORMAT)
    first, second = steps[2 * HALF], steps[2 * HALF + 1]
    scale = values[AT].to(tl.float32)
    if record_of(FORMAT).has_minimum:
        return first * scale, first * scale * code_middle(FORMAT) - second * values[AT + 1].to(tl.float32)
    else:
        return first * scale, second * scale


@triton.jit
def add_block_of_token(
    sums: tl.tuple,
    chunk: tl.tuple,
    x_row: tl.tensor,
    offsets: tl.tuple,
    block: tl.tensor,
    inside: tl.tensor,
    BLOCK: tl.constexpr,
    EACH: tl.constexpr,
    FORMAT: tl.constexpr,
    TILES: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    IS_BF16: tl.constexpr,
    WARPS: tl.constexpr,
    KEPT: tl.constexpr,
) -> tl.tuple:
    """A single token's sums with those of a block added: of each row, the sum over the lane's channels, and the sum for
    minima times `operand_offset`.

    x_row: of the lane's first channel. offsets: of offset_operands. BLOCK: of the chunk.
    """
    first_x = _own_words(x_row, block, inside, 0, FORMAT, IS_WHOLE, WARPS)
    nothing = tl.zeros([32 * WARPS], tl.float32)
    first_total = (nothing, nothing, nothing, nothing)
    second_total = first_total
    for j in tl.static_range(8):
        first_total = step_sums(first_total, offsets, first_x, 0, j, 1, IS_BF16, WARPS)
    first = _operands(chunk, BLOCK, 0, EACH, 2 * TILES, FORMAT, IS_BF16)
    first_parts: tl.tuple = ()
    for _ in tl.static_range(TILES):
        first_parts = first_parts + first_total
    second_x = _own_words(x_row, block, inside, 1, FORMAT, IS_WHOLE, WARPS)
    for k in tl.static_range(8):
        first_parts = step_sums(first_parts, first, first_x, operand_of_step(FORMAT, k), k, TILES, IS_BF16, WARPS)
        second_total = step_sums(second_total, offsets, second_x, 0, k, 1, IS_BF16, WARPS)
    second = _operands(chunk, BLOCK, 1, EACH, 2 * TILES, FORMAT, IS_BF16)
    second_parts: tl.tuple = ()
    for _ in tl.static_range(TILES):
        second_parts = second_parts + second_total
    for k in tl.static_range(8):
        second_parts = step_sums(second_parts, second, second_x, operand_of_step(FORMAT, k), k, TILES, IS_BF16, WARPS)
    added: tl.tuple = ()
    for i in tl.static_range(2 * TILES):
        added = added + _scaled_row(
            sums, first_parts, second_parts, first_total[0], second_total[0], chunk, i,
            (2 * TILES * BLOCK + i) * EACH, FORMAT, KEPT,
        )  # fmt: skip
    return added


@triton.jit
def _operands(
    chunk: tl.tuple,
    BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    EACH: tl.constexpr,
    ROWS: tl.constexpr,
    FORMAT: tl.constexpr,
    IS_BF16: tl.constexpr,
) -> tl.tuple:
    """Operands of each row's half of a block."""
    found: tl.tuple = ()
    for i in tl.static_range(ROWS):
        words = _half_words(chunk, (BLOCK * ROWS + i) * EACH, HALF, FORMAT)
        found = found + row_operands(words, 0, FORMAT, IS_BF16)
    return found


@triton.jit
def _scaled_row(
    sums: tl.tuple,
    first: tl.tuple,
    second: tl.tuple,
    first_total: tl.tensor,
    second_total: tl.tensor,
    chunk: tl.tuple,
    ROW: tl.constexpr,
    FIRST: tl.constexpr,
    FORMAT: tl.constexpr,
    KEPT: tl.constexpr,
) -> tl.tuple:
    """The sums of a row with the parts of both halves added, times their scales."""
    AT: tl.constexpr = FIRST + _code_words(FORMAT) + _step_values(FORMAT)
    steps = _steps(chunk, FIRST, FORMAT)
    if record_of(FORMAT).has_minimum:
        part = first[2 * ROW] * steps[0] + second[2 * ROW] * steps[2]
        least = first_total * steps[1] + second_total * steps[3]
        return (
            sums[ROW * KEPT] + part * chunk[AT].to(tl.float32),
            sums[ROW * KEPT + 1] + least * chunk[AT + 1].to(tl.float32),
        )
    else:
        part = first[2 * ROW] * steps[0] + first[2 * ROW + 1] * steps[1]
        part += second[2 * ROW] * steps[2]
        part += second[2 * ROW + 1] * steps[3]
        return (sums[ROW * KEPT] + part * chunk[AT].to(tl.float32),)


@triton.jit
def _own_words(
    x_row: tl.tensor,
    block: tl.tensor,
    inside: tl.tensor,
    HALF: tl.constexpr,
    FORMAT: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    WARPS: tl.constexpr,
) -> tl.tuple:
    """16 words of x of half a block, in the lane whose column has the sums of their group, and zeros in the others."""
    lane = tl.arange(0, 32 * WARPS) % 32
    found: tl.tuple = ()
    for j in tl.static_range(4):
        own = lane // 4 == lane % 4 * 2 + _column(FORMAT, j)
        place = x_row + (block * _CHANNELS + (32 * HALF + 8 * j))
        found = found + words_of_rows(place, own if IS_WHOLE else inside & own, 4, False, "")
    return found


@triton.constexpr_function
def _column(format: str, eighth: int) -> int:
    """The column, of a lane's two, with the sums of the group that eight of its channels belong to."""
    return 0 if _groups(format) == 2 else eighth // 2


@triton.jit
def sum_of_lanes(lanes: tl.tensor, KEPT: tl.constexpr, FORMAT: tl.constexpr, IS_BF16: tl.constexpr) -> tl.tensor:
    """The sums of rows, four times the same, [ROWS, 4], from those of each row's four lanes, [ROWS, 4 · KEPT]."""
    if KEPT == 2:
        codes, minima = lanes.reshape(lanes.shape[0], 4, 2).split()
        lanes = codes + minima * (1.0 / operand_offset(FORMAT, IS_BF16))
    return tl.broadcast_to(tl.sum(lanes, 1)[:, None], [lanes.shape[0], 4])
