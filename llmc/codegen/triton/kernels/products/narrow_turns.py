"""Device code of coded_narrow.py: the sums of a turn of 128 channels. Each thread has words of codes and of x.

A chunk is a tuple of the values that a thread has loaded. Each turn and each row has EACH of them: words of codes, and
then scales, with zeros or shifts.
"""

import triton
import triton.language as tl

from llmc.codegen.triton.kernels.products.code_operands import narrow_words, offset_pair, operand_offset, row_operands
from llmc.codegen.triton.kernels.products.folded_scales import (
    addends,
    folded,
    folded_factors,
    group_sums,
    shifted_addends,
)
from llmc.codegen.triton.kernels.products.format_facts import low_bits
from llmc.codegen.triton.kernels.products.matrix_words import matrix_sums
from llmc.codegen.triton.kernels.products.weight_codes import small_floats


@triton.jit
def add_turn(
    sums: tl.tuple,
    chunk: tl.tuple,
    x: tl.tuple,
    x_once: tl.tuple,
    FIRST_TILE: tl.constexpr,
    FIRST_ROWS: tl.constexpr,
    EACH: tl.constexpr,
    FORMAT: tl.constexpr,
    IN_GROUPS: tl.constexpr,
    TILES: tl.constexpr,
    TOKEN_BLOCK: tl.constexpr,
    IS_BF16: tl.constexpr,
    WARPS: tl.constexpr,
    KEPT: tl.constexpr,
) -> tl.tuple:
    """The sums of TILES from the FIRST_TILE on, with those of a turn in one group added. FIRST_ROWS: where its rows
    begin in a chunk, in tiles. x_once: words of x, of one token each of a turn's channels once."""
    HAS_ZEROS: tl.constexpr = EACH - narrow_words(FORMAT) - IN_GROUPS > 0
    total = x
    if HAS_ZEROS or low_bits(FORMAT) < 8:
        total = _offset_sums(x_once, FORMAT, IS_BF16, WARPS)
    added: tl.tuple = ()
    for i in tl.static_range(TILES):
        part = _code_sums(chunk, x, 2 * (FIRST_ROWS + i) * EACH, EACH, FORMAT, IS_BF16, WARPS)
        for half in tl.static_range(2):
            values = _row_values(
                part[2 * half], part[2 * half + 1], total, chunk, (2 * (FIRST_ROWS + i) + half + 1) * EACH - 1, FORMAT,
                IN_GROUPS, HAS_ZEROS, TOKEN_BLOCK, IS_BF16,
            )  # fmt: skip
            for k in tl.static_range(KEPT):
                added += (sums[((FIRST_TILE + i) * 2 + half) * KEPT + k] + values[k],)
    return added


@triton.jit
def add_folded(
    sums: tl.tuple,
    chunk: tl.tuple,
    x: tl.tuple,
    FIRST_TILE: tl.constexpr,
    FIRST_ROWS: tl.constexpr,
    EACH: tl.constexpr,
    FORMAT: tl.constexpr,
    PARTS: tl.constexpr,
    TILES: tl.constexpr,
    IS_BF16: tl.constexpr,
    WARPS: tl.constexpr,
) -> tl.tuple:
    """The same of a turn in several groups (folded_scales.py)."""
    VALUES: tl.constexpr = (EACH - narrow_words(FORMAT)) // PARTS
    totals = x
    if VALUES == 2 or (IS_BF16 and low_bits(FORMAT) < 8):
        totals = group_sums(x, PARTS, IS_BF16, WARPS)
    added: tl.tuple = ()
    for i in tl.static_range(TILES):
        part = (
            sums[4 * (FIRST_TILE + i)], sums[4 * (FIRST_TILE + i) + 1], sums[4 * (FIRST_TILE + i) + 2],
            sums[4 * (FIRST_TILE + i) + 3],
        )  # fmt: skip
        low, low_others = _folded_operands(chunk, 2 * (FIRST_ROWS + i) * EACH, PARTS, VALUES, FORMAT, IS_BF16)
        high, high_others = _folded_operands(chunk, (2 * (FIRST_ROWS + i) + 1) * EACH, PARTS, VALUES, FORMAT, IS_BF16)
        for step in tl.static_range(8):
            part = _step_sums(part, low, high, x, _operand_of_step(FORMAT, step), step, IS_BF16, WARPS)
        for k in tl.static_range(len(low_others) // 2):
            part = matrix_sums(
                low_others[2 * k], high_others[2 * k], low_others[2 * k + 1], high_others[2 * k + 1], totals[k],
                totals[k], part, IS_BF16, WARPS,
            )  # fmt: skip
        added = added + part
    return added


@triton.jit
def _folded_operands(
    chunk: tl.tuple,
    FIRST: tl.constexpr,
    PARTS: tl.constexpr,
    VALUES: tl.constexpr,
    FORMAT: tl.constexpr,
    IS_BF16: tl.constexpr,
) -> tuple[tl.tuple, tl.tuple]:
    """Operands of a row's turn, whose words are at FIRST, times the scales behind them, each the first of VALUES; and
    those of the rest of its groups' shifts."""
    WORDS: tl.constexpr = narrow_words(FORMAT)
    plain = row_operands(chunk, FIRST, FORMAT, IS_BF16)
    factors: tl.tuple = ()
    others: tl.tuple = ()
    for part in tl.static_range(PARTS):
        scale = folded_factors(chunk[FIRST + WORDS + part * VALUES], FORMAT, IS_BF16)
        if VALUES == 2:
            added = shifted_addends(scale, chunk[FIRST + WORDS + part * VALUES + 1], FORMAT, IS_BF16)
        else:
            added = addends(scale, FORMAT, IS_BF16)
        factors += (scale, added[0])
        others = others + added[1:]
    operands: tl.tuple = ()
    for k in tl.static_range(16):
        operands += (_folded_operand(plain, factors, k, _part_of(FORMAT, PARTS, k), IS_BF16),)
    return operands, others


@triton.jit
def _folded_operand(
    plain: tl.tuple, factors: tl.tuple, PLACE: tl.constexpr, PART: tl.constexpr, IS_BF16: tl.constexpr
) -> tl.tensor:
    return folded(plain[PLACE], factors[2 * PART], factors[2 * PART + 1], IS_BF16)


@triton.constexpr_function
def _part_of(format: str, parts: int, operand: int) -> int:
    """The part of a lane's channels that an operand is of: of 4-bit codes, the last two of each word are of the second
    one; of others, those of the last words."""
    if parts == 1:
        return 0
    return operand % 4 // 2 if low_bits(format) == 4 else operand // 8


@triton.jit
def _offset_sums(x: tl.tuple, FORMAT: tl.constexpr, IS_BF16: tl.constexpr, WARPS: tl.constexpr) -> tl.tuple:
    """Sums of pairs of words of x, times the offset of codes (code_operands.py), negative."""
    offsets = tl.full([32 * WARPS], offset_pair(FORMAT, IS_BF16), tl.int32)
    nothing = tl.zeros([32 * WARPS], tl.float32)
    total = (nothing, nothing, nothing, nothing)
    for j in tl.static_range(len(x) // 2):
        total = matrix_sums(offsets, offsets, offsets, offsets, x[2 * j], x[2 * j + 1], total, IS_BF16, WARPS)
    return total


@triton.jit
def _row_values(
    first: tl.tensor,
    second: tl.tensor,
    total: tl.tuple,
    chunk: tl.tuple,
    LAST: tl.constexpr,
    FORMAT: tl.constexpr,
    IN_GROUPS: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    TOKEN_BLOCK: tl.constexpr,
    IS_BF16: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The addends of a turn for the sums of a row. first, second: sums of operands. total: of _offset_sums. LAST: where
    the row's values in the chunk end.

    A single token's x lies once in the columns of a matrix instruction. The second value is then the lane's part of the
    sum for offsets and zeros.
    """
    if HAS_ZEROS or low_bits(FORMAT) < 8:
        one, two = total[0], total[1]
        if TOKEN_BLOCK == 1:
            one += two
        IN_TOTAL: tl.constexpr = 1.0 if low_bits(FORMAT) < 8 else 0.0
        if HAS_ZEROS:
            factor = small_floats(chunk[LAST - IN_GROUPS].to(tl.int32)) * (1.0 / operand_offset(FORMAT, IS_BF16))
            factor += IN_TOTAL
            one, two = one * factor, two * factor
        if TOKEN_BLOCK == 1:
            second = one
        else:
            first, second = first + one, second + two
    if IN_GROUPS:
        scale = _fp32(chunk[LAST])
        first, second = first * scale, second * scale
    return first, second


@triton.jit
def _fp32(number: tl.tensor) -> tl.tensor:
    if number.dtype == tl.bfloat16:
        return (number.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return number.to(tl.float32)


@triton.jit
def _code_sums(
    chunk: tl.tuple,
    x: tl.tuple,
    FIRST: tl.constexpr,
    EACH: tl.constexpr,
    FORMAT: tl.constexpr,
    IS_BF16: tl.constexpr,
    WARPS: tl.constexpr,
) -> tl.tuple:
    """Sums of x times operands, of the rows whose words are at FIRST and EACH further in a chunk."""
    low = row_operands(chunk, FIRST, FORMAT, IS_BF16)
    high = row_operands(chunk, FIRST + EACH, FORMAT, IS_BF16)
    nothing = tl.zeros([32 * WARPS], tl.float32)
    sums = (nothing, nothing, nothing, nothing)
    for step in tl.static_range(8):
        sums = _step_sums(sums, low, high, x, _operand_of_step(FORMAT, step), step, IS_BF16, WARPS)
    return sums


@triton.jit
def _step_sums(
    sums: tl.tuple,
    low: tl.tuple,
    high: tl.tuple,
    x: tl.tuple,
    AT: tl.constexpr,
    STEP: tl.constexpr,
    IS_BF16: tl.constexpr,
    WARPS: tl.constexpr,
) -> tl.tuple:
    """The sums, with 16 channels added. AT: their first operand in those of rows g, and of rows 8 + g."""
    return matrix_sums(low[AT], high[AT], low[AT + 1], high[AT + 1], x[2 * STEP], x[2 * STEP + 1], sums, IS_BF16, WARPS)


@triton.constexpr_function
def _operand_of_step(format: str, step: int) -> int:
    """The first of two operands of the words' that a matrix instruction multiplies: of 4-bit codes first all in the low
    halves of bytes."""
    return step % 4 * 4 + step // 4 * 2 if low_bits(format) == 4 else 2 * step
