"""Device code of coded_narrow.py: the sums of a turn of 128 channels. Each thread has words of codes and of x.

A chunk is a tuple of the values that a thread has loaded. Each turn and each row has EACH of them: words of codes, and
then scales, with zeros or shifts.
"""

import triton
import triton.language as tl

from llmc.codegen.triton.kernels.products.code_operands import narrow_words, operand_offset, row_operands
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
    offsets: tl.tuple,
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
    """The sums with those of a turn in one group added.

    FIRST_ROWS: where its rows begin in a chunk, in tiles. x: 16 words for every eight tokens. x_once: words of one
    token, each of a turn's channels once; of more tokens, as x. offsets: of offset_operands.
    """
    HAS_ZEROS: tl.constexpr = EACH - narrow_words(FORMAT) - IN_GROUPS > 0
    COLUMNS: tl.constexpr = len(x) // 16
    totals: tl.tuple = ()
    if HAS_ZEROS or low_bits(FORMAT) < 8:
        totals = _offset_sums(x_once, offsets, COLUMNS, IS_BF16, WARPS)
    part: tl.tuple = ()
    for i in tl.static_range(TILES):
        part = part + _first_sums(
            totals, chunk, 2 * (FIRST_ROWS + i) * EACH, EACH, COLUMNS, FORMAT, IN_GROUPS, HAS_ZEROS, TOKEN_BLOCK,
            IS_BF16, WARPS,
        )  # fmt: skip
    part = _code_sums(part, chunk, x, 2 * FIRST_ROWS * EACH, EACH, TILES, FORMAT, IS_BF16, WARPS)
    added: tl.tuple = ()
    for i in tl.static_range(TILES):
        added = added + _scaled_sums(
            sums, part, totals, chunk, i, 2 * (FIRST_ROWS + i) * EACH, EACH, COLUMNS, FORMAT, IN_GROUPS, HAS_ZEROS,
            TOKEN_BLOCK, IS_BF16, KEPT,
        )  # fmt: skip
    return added


@triton.jit
def _code_sums(
    sums: tl.tuple,
    chunk: tl.tuple,
    x: tl.tuple,
    FIRST: tl.constexpr,
    EACH: tl.constexpr,
    TILES: tl.constexpr,
    FORMAT: tl.constexpr,
    IS_BF16: tl.constexpr,
    WARPS: tl.constexpr,
) -> tl.tuple:
    """The sums with the products of x and the operands of the rows whose values begin at FIRST in the chunk added."""
    # The sums of several tiles do not wait for each other. Operands of 8-bit codes are too many for that.
    AT_ONCE: tl.constexpr = 1 if low_bits(FORMAT) == 8 else TILES
    LENGTH: tl.constexpr = len(sums) // TILES * AT_ONCE
    added: tl.tuple = ()
    for i in tl.static_range(TILES // AT_ONCE):
        operands: tl.tuple = ()
        for k in tl.static_range(2 * AT_ONCE):
            operands = operands + row_operands(chunk, FIRST + (2 * AT_ONCE * i + k) * EACH, FORMAT, IS_BF16)
        of_tiles = sums[i * LENGTH : (i + 1) * LENGTH]
        added = added + operand_sums(of_tiles, operands, x, AT_ONCE, FORMAT, IS_BF16, WARPS)
    return added


@triton.jit
def _first_sums(
    totals: tl.tuple,
    chunk: tl.tuple,
    FIRST: tl.constexpr,
    EACH: tl.constexpr,
    COLUMNS: tl.constexpr,
    FORMAT: tl.constexpr,
    IN_GROUPS: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    TOKEN_BLOCK: tl.constexpr,
    IS_BF16: tl.constexpr,
    WARPS: tl.constexpr,
) -> tl.tuple:
    """The terms of offsets and zeros in a tile's sums, to which matrix instructions add the products; zeros for a
    single token, whose totals are parts of lanes. FIRST: where the tile's values begin in the chunk."""
    found: tl.tuple = ()
    if TOKEN_BLOCK == 1 or (low_bits(FORMAT) == 8 and not HAS_ZEROS):
        for _ in tl.static_range(4 * COLUMNS):
            found += (tl.zeros([32 * WARPS], tl.float32),)
        return found
    elif HAS_ZEROS:
        low = _zero_factor(chunk[FIRST + EACH - 1 - IN_GROUPS], FORMAT, IS_BF16)
        high = _zero_factor(chunk[FIRST + 2 * EACH - 1 - IN_GROUPS], FORMAT, IS_BF16)
        for n in tl.static_range(COLUMNS):
            found += (
                totals[4 * n] * low, totals[4 * n + 1] * low, totals[4 * n + 2] * high, totals[4 * n + 3] * high,
            )  # fmt: skip
        return found
    else:
        return totals


@triton.jit
def _scaled_sums(
    sums: tl.tuple,
    part: tl.tuple,
    totals: tl.tuple,
    chunk: tl.tuple,
    TILE: tl.constexpr,
    FIRST: tl.constexpr,
    EACH: tl.constexpr,
    COLUMNS: tl.constexpr,
    FORMAT: tl.constexpr,
    IN_GROUPS: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    TOKEN_BLOCK: tl.constexpr,
    IS_BF16: tl.constexpr,
    KEPT: tl.constexpr,
) -> tl.tuple:
    """A tile's sums, with its part times the group's scale added."""
    added: tl.tuple = ()
    for n in tl.static_range(COLUMNS):
        for half in tl.static_range(2):
            for k in tl.static_range(KEPT):
                value = part[4 * (TILE * COLUMNS + n) + 2 * half + k]
                if TOKEN_BLOCK == 1 and k == 1:
                    value = totals[0] + totals[1]
                    if HAS_ZEROS:
                        value *= _zero_factor(chunk[FIRST + (half + 1) * EACH - 1 - IN_GROUPS], FORMAT, IS_BF16)
                if IN_GROUPS:
                    value *= _fp32(chunk[FIRST + (half + 1) * EACH - 1])
                added += (sums[((TILE * COLUMNS + n) * 2 + half) * KEPT + k] + value,)
    return added


@triton.jit
def add_folded(
    sums: tl.tuple,
    rows: tl.tuple,
    x: tl.tuple,
    FORMAT: tl.constexpr,
    PARTS: tl.constexpr,
    TILES: tl.constexpr,
    IS_BF16: tl.constexpr,
    WARPS: tl.constexpr,
) -> tl.tuple:
    """The same of a turn in several groups (folded_scales.py). rows: a turn's values of each row."""
    EACH: tl.constexpr = len(rows) // (2 * TILES)
    VALUES: tl.constexpr = (EACH - narrow_words(FORMAT)) // PARTS
    COLUMNS: tl.constexpr = len(x) // 16
    totals: tl.tuple = ()
    if VALUES == 2 or (IS_BF16 and low_bits(FORMAT) < 8):
        for n in tl.static_range(COLUMNS):
            first, second = group_sums(x[16 * n : 16 * n + 16], PARTS, IS_BF16, WARPS)
            totals += (first, first, second, second)
    added: tl.tuple = ()
    for i in tl.static_range(TILES):
        low, low_others = _folded_operands(rows, 2 * i * EACH, PARTS, VALUES, FORMAT, IS_BF16)
        high, high_others = _folded_operands(rows, (2 * i + 1) * EACH, PARTS, VALUES, FORMAT, IS_BF16)
        part = sums[4 * COLUMNS * i : 4 * COLUMNS * (i + 1)]
        part = operand_sums(part, low + high, x, 1, FORMAT, IS_BF16, WARPS)
        for k in tl.static_range(len(low_others) // 2):
            part = step_sums(part, low_others + high_others, totals, 2 * k, k, 1, IS_BF16, WARPS)
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
def _offset_sums(
    x: tl.tuple, offsets: tl.tuple, COLUMNS: tl.constexpr, IS_BF16: tl.constexpr, WARPS: tl.constexpr
) -> tl.tuple:
    """Sums of pairs of words of x, times the offset of codes (code_operands.py), negative; four for every eight
    tokens."""
    totals: tl.tuple = ()
    for _ in tl.static_range(4 * COLUMNS):
        totals += (tl.zeros([32 * WARPS], tl.float32),)
    for j in tl.static_range(len(x) // COLUMNS // 2):
        totals = step_sums(totals, offsets, x, 0, j, 1, IS_BF16, WARPS)
    return totals


@triton.jit
def _zero_factor(zero: tl.tensor, FORMAT: tl.constexpr, IS_BF16: tl.constexpr) -> tl.tensor:
    """The offset of a row's codes plus its zero, as a multiple of the offset that _offset_sums multiplies."""
    return small_floats(zero.to(tl.int32)) * (1.0 / operand_offset(FORMAT, IS_BF16)) + (
        1.0 if low_bits(FORMAT) < 8 else 0.0
    )


@triton.jit
def _fp32(number: tl.tensor) -> tl.tensor:
    if number.dtype == tl.bfloat16:
        return (number.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return number.to(tl.float32)


@triton.jit
def operand_sums(
    sums: tl.tuple,
    operands: tl.tuple,
    x: tl.tuple,
    TILES: tl.constexpr,
    FORMAT: tl.constexpr,
    IS_BF16: tl.constexpr,
    WARPS: tl.constexpr,
) -> tl.tuple:
    """The sums with a turn's channels added. operands: 16 of each row."""
    for k in tl.static_range(8):
        sums = step_sums(sums, operands, x, operand_of_step(FORMAT, k), k, TILES, IS_BF16, WARPS)
    return sums


@triton.jit
def step_sums(
    sums: tl.tuple,
    operands: tl.tuple,
    x: tl.tuple,
    AT: tl.constexpr,
    STEP: tl.constexpr,
    TILES: tl.constexpr,
    IS_BF16: tl.constexpr,
    WARPS: tl.constexpr,
) -> tl.tuple:
    """The sums of all tiles and tokens with 16 channels added. AT: the first of two operands of a row. STEP: the pair
    of words of x, of those of eight tokens."""
    COLUMNS: tl.constexpr = len(sums) // (4 * TILES)
    OPERANDS: tl.constexpr = len(operands) // (2 * TILES)
    WORDS: tl.constexpr = len(x) // COLUMNS
    added: tl.tuple = ()
    for i in tl.static_range(TILES):
        for n in tl.static_range(COLUMNS):
            added = added + matrix_sums(
                operands[2 * i * OPERANDS + AT], operands[(2 * i + 1) * OPERANDS + AT],
                operands[2 * i * OPERANDS + AT + 1], operands[(2 * i + 1) * OPERANDS + AT + 1],
                x[n * WORDS + 2 * STEP], x[n * WORDS + 2 * STEP + 1],
                sums[4 * (i * COLUMNS + n) : 4 * (i * COLUMNS + n) + 4], IS_BF16, WARPS,
            )  # fmt: skip
    return added


@triton.constexpr_function
def operand_of_step(format: str, step: int) -> int:
    """The first of two operands of the words' that a matrix instruction multiplies: of 4-bit codes first all in the low
    halves of bytes."""
    return step % 4 * 4 + step // 4 * 2 if low_bits(format) == 4 else 2 * step
