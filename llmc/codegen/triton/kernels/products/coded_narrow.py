"""Products of a few tokens with weights of 4 to 8 bits on the matrix units: yᵀ = W·xᵀ, bound by reading W's codes once.

mma.sync takes its left operand from registers: element (row, channel) from a fixed lane. The order of channels within
a product is free if x has the same one. So a lane loads 16 bytes of a row, which are 16 or 32 neighbouring channels,
and its codes become operands where they are (code_operands.py). Operands of fewer than 8 bits have an offset. It and
W's zeros are subtracted from the sums of each group of channels, with sums of x from the same units. If groups have
fewer than 128 channels, operands are multiplied by their scales first (folded_scales.py), except the operands of
K-quants for a single token (super_blocks.py).

A block has OUT_BLOCK rows of W, its warps divide IN, and their sums meet in shared memory at the end.
"""

import triton
import triton.language as tl

from llmc.codegen.triton.kernels.launch_edge import wait_for_launch_before
from llmc.codegen.triton.kernels.products.code_operands import offset_operands
from llmc.codegen.triton.kernels.products.folded_scales import folded_parts, is_folded, scale_and_shift, sum_factor
from llmc.codegen.triton.kernels.products.format_facts import above_bits, by_group, low_bits
from llmc.codegen.triton.kernels.products.matrix_words import issue_loads, words_of_rows
from llmc.codegen.triton.kernels.products.narrow_turns import add_folded, add_turn
from llmc.codegen.triton.kernels.products.operand_tiles import read_tile
from llmc.codegen.triton.kernels.products.product_store import store_product
from llmc.codegen.triton.kernels.products.super_blocks import (
    add_block_of_token,
    folded_rows,
    is_in_blocks,
    load_block,
    sum_of_lanes,
)
from llmc.codegen.triton.machine_code.budget import EDGE_FREE, STREAMING, Budget, Limit

# Channels that the four lanes of a row of a matrix instruction read at once, 32 each.
_TURN = tl.constexpr(128)
# Rows of W, and tokens, of a matrix instruction.
_ROWS, _TOKENS = tl.constexpr(16), tl.constexpr(8)


@triton.jit
def code_narrow_kernel(
    x_ptr: tl.tensor,
    x_row_stride: int,
    x_scales_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    zeros_ptr: tl.tensor,
    minima_ptr: tl.tensor,
    steps_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    delta_row_stride: int,
    adapters_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    residual_row_stride: int,
    y_ptr: tl.tensor,
    y_row_stride: int,
    tokens: int,
    scale: float,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    FORMAT: tl.constexpr,
    X_FORMAT: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    GROUPS: tl.constexpr,
    FLOATS: tl.constexpr,
    X_GROUPS: tl.constexpr,
    TOKEN_BLOCK: tl.constexpr,
    OUT_BLOCK: tl.constexpr,
    WARPS: tl.constexpr,
    TURNS: tl.constexpr,
    AHEAD: tl.constexpr,
) -> None:
    """Program (j, i): the j-th OUT_BLOCK outputs of the i-th TOKEN_BLOCK tokens. Sums in fp32.

    WARPS: of a block. TURNS: of 128 channels, that a warp loads before it multiplies. AHEAD: whether the first of them
    are loaded before x is there.
    """
    tl.static_assert(low_bits(FORMAT) >= 4 and X_FORMAT == "none", "other codes need other operands")
    first_out, first_token = tl.program_id(0).to(tl.int64) * OUT_BLOCK, tl.program_id(1).to(tl.int64) * TOKEN_BLOCK
    TILES: tl.constexpr = OUT_BLOCK // _ROWS
    FOLDED: tl.constexpr = is_folded(FORMAT, IN, GROUPS)
    IS_PLAIN: tl.constexpr = low_bits(FORMAT) == 8 and zeros_ptr is None
    BY_LANE: tl.constexpr = TOKEN_BLOCK == 1 and is_in_blocks(FORMAT, IN, FLOATS)
    # A single token has a sum of its codes, and one for offsets and zeros, or minima, if there are any.
    IS_ONE: tl.constexpr = minima_ptr is None if BY_LANE else TOKEN_BLOCK == 1 and IS_PLAIN and not FOLDED
    KEPT: tl.constexpr = 1 if IS_ONE else 2
    sums = _lane_sums(
        x_ptr, x_row_stride, codes_ptr, scales_ptr, zeros_ptr, minima_ptr, steps_ptr, first_token, first_out, tokens,
        IN, OUT, GATED, FORMAT, ROW_BYTES, GROUPS, FLOATS, TOKEN_BLOCK, OUT_BLOCK, WARPS, TURNS, AHEAD, KEPT,
    )  # fmt: skip
    out, token = tl.arange(0, OUT_BLOCK), tl.arange(0, 4 if TOKEN_BLOCK == 1 else TOKEN_BLOCK)
    product = _tile(sums, 0, TILES, TOKEN_BLOCK, WARPS, KEPT, FOLDED, BY_LANE)
    up = product
    if GATED:
        up = _tile(sums, TILES, TILES, TOKEN_BLOCK, WARPS, KEPT, FOLDED, BY_LANE)
    if BY_LANE:
        IS_BF16: tl.constexpr = x_ptr.dtype.element_ty == tl.bfloat16
        product = sum_of_lanes(product, KEPT, FORMAT, IS_BF16)
        up = sum_of_lanes(up, KEPT, FORMAT, IS_BF16)
    elif FOLDED:
        FACTOR: tl.constexpr = sum_factor(True, x_ptr.dtype.element_ty == tl.bfloat16)
        product, up = product * FACTOR, up * FACTOR
    if not by_group(FORMAT, GROUPS):
        row = tl.minimum(first_out + out, OUT - 1)[:, None]
        product *= tl.load(scales_ptr + row).to(tl.float32)
        if GATED:
            up *= tl.load(scales_ptr + row + OUT).to(tl.float32)
    store_product(
        product, up, first_token, first_out, token[None, :], out[:, None], tokens,
        bias_ptr, delta_ptr, delta_row_stride, adapters_ptr, residual_ptr, residual_row_stride,
        y_ptr, y_row_stride, scale, OUT, GATED, ACTIVATION,
    )  # fmt: skip


@triton.jit
def _lane_sums(
    x_ptr: tl.tensor,
    x_row_stride: int,
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    zeros_ptr: tl.tensor,
    minima_ptr: tl.tensor,
    steps_ptr: tl.tensor,
    first_token: tl.tensor,
    first_out: tl.tensor,
    tokens: int,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    GATED: tl.constexpr,
    FORMAT: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    GROUPS: tl.constexpr,
    FLOATS: tl.constexpr,
    TOKEN_BLOCK: tl.constexpr,
    OUT_BLOCK: tl.constexpr,
    WARPS: tl.constexpr,
    TURNS: tl.constexpr,
    AHEAD: tl.constexpr,
    KEPT: tl.constexpr,
) -> tl.tuple:
    """Each thread's sums over its warp's channels: for every 16 rows of W, and then of the gate's partners, every 8
    tokens, KEPT of each of its two rows: those of a matrix instruction, or of one token."""
    TILES: tl.constexpr = OUT_BLOCK // _ROWS * (2 if GATED else 1)
    COLUMNS: tl.constexpr = (TOKEN_BLOCK + 7) // 8
    COUNT: tl.constexpr = IN // _TURN
    CHUNKS: tl.constexpr = (COUNT + WARPS * TURNS - 1) // (WARPS * TURNS)
    thread = tl.arange(0, 32 * WARPS)
    of_row, of_column, first = thread % 32 // 4, thread % 4, thread // 32 * (CHUNKS * TURNS)
    IN_BLOCKS: tl.constexpr = is_in_blocks(FORMAT, IN, FLOATS)
    code_rows: tl.tuple = ()
    rows: tl.tuple = ()
    x_rows: tl.tuple = ()
    sums: tl.tuple = ()
    for i in tl.static_range(2 * TILES):
        row = first_out + i % (OUT_BLOCK // 8) * 8 + of_row
        # Rows past the end repeat the last one, so that no load needs a mask for them.
        row = row if OUT % OUT_BLOCK == 0 else tl.minimum(row, OUT - 1)
        row += (i // (OUT_BLOCK // 8)) * OUT
        code_rows += (codes_ptr + (row * ROW_BYTES + of_column * (32 if IN_BLOCKS else 16)),)
        rows += (row,)
    for n in tl.static_range(COLUMNS):
        token = tl.minimum(first_token + n * _TOKENS + of_row, tokens - 1)
        x_rows += (x_ptr + (token * x_row_stride + of_column * (64 if IN_BLOCKS else _run(FORMAT))),)
    if TOKEN_BLOCK == 1:
        x_rows += (x_ptr + (first_token * x_row_stride + thread % 32 * 4),)
    IS_OFTEN: tl.constexpr = IN_BLOCKS or TOKEN_BLOCK > 1
    offsets = offset_operands(x_ptr, FORMAT, x_ptr.dtype.element_ty == tl.bfloat16, 32 * WARPS, IS_OFTEN)
    for _ in tl.static_range(TILES * COLUMNS * 2 * KEPT):
        sums += (tl.zeros([32 * WARPS], tl.float32),)
    if AHEAD:
        chunk = _load_chunk(
            code_rows, rows, scales_ptr, zeros_ptr, minima_ptr, steps_ptr, first, IN, GROUPS, FLOATS, FORMAT, TILES,
            WARPS, TURNS,
        )  # fmt: skip
        issue_loads(first)
        wait_for_launch_before()
        sums = _add_chunk(
            sums, chunk, x_rows, offsets, first, IN, GROUPS, FLOATS, FORMAT, TILES, TOKEN_BLOCK, WARPS, TURNS, KEPT
        )
        first += TURNS
    else:
        wait_for_launch_before()
    for _ in range(CHUNKS - 1 if AHEAD else CHUNKS):
        chunk = _load_chunk(
            code_rows, rows, scales_ptr, zeros_ptr, minima_ptr, steps_ptr, first, IN, GROUPS, FLOATS, FORMAT, TILES,
            WARPS, TURNS,
        )  # fmt: skip
        issue_loads(first)
        sums = _add_chunk(
            sums, chunk, x_rows, offsets, first, IN, GROUPS, FLOATS, FORMAT, TILES, TOKEN_BLOCK, WARPS, TURNS, KEPT
        )
        first += TURNS
    return sums


@triton.constexpr_function
def _run(format: str) -> int:
    """Neighbouring channels of 16 bytes of codes."""
    return 128 // int(low_bits(format))


@triton.jit
def _load_chunk(
    code_rows: tl.tuple,
    rows: tl.tuple,
    scales_ptr: tl.tensor,
    zeros_ptr: tl.tensor,
    minima_ptr: tl.tensor,
    steps_ptr: tl.tensor,
    first: tl.tensor,
    IN: tl.constexpr,
    GROUPS: tl.constexpr,
    FLOATS: tl.constexpr,
    FORMAT: tl.constexpr,
    TILES: tl.constexpr,
    WARPS: tl.constexpr,
    TURNS: tl.constexpr,
) -> tl.tuple:
    """Load what TURNS times 128 channels from 128·first on have of each row of a thread: words of codes, the zero and
    the scale of the group, if there are any, or the scales and shifts of the thread's groups. Scales past the end are
    0."""
    COUNT: tl.constexpr = IN // _TURN
    IS_WHOLE: tl.constexpr = COUNT % (WARPS * TURNS) == 0
    LOADS: tl.constexpr = low_bits(FORMAT) // 4
    found: tl.tuple = ()
    if is_in_blocks(FORMAT, IN, FLOATS):
        tl.static_assert(TURNS % 2 == 0, "a block has two turns")
        for k in tl.static_range(TURNS // 2):
            for i in tl.static_range(2 * TILES):
                found = found + load_block(
                    code_rows[i], rows[i], scales_ptr, minima_ptr, steps_ptr, first // 2 + k, first + 2 * k < COUNT, IN,
                    GROUPS, FORMAT, IS_WHOLE, WARPS,
                )  # fmt: skip
        return found
    for turn in tl.static_range(TURNS):
        inside = first + turn < COUNT
        for i in tl.static_range(2 * TILES):
            for j in tl.static_range(LOADS):
                place = code_rows[i] + ((first + turn) * (LOADS * 64) + 64 * j)
                found = found + words_of_rows(place, inside, 4, IS_WHOLE, "evict_first")
            if above_bits(FORMAT) > 0:
                # A lane's part of the second plane is a quarter, or half, as long as that of the first.
                column = tl.arange(0, 32 * WARPS) % 4 * (4 * above_bits(FORMAT) - 16)
                place = code_rows[i] + (column + IN // 2 + (first + turn) * (16 * above_bits(FORMAT)))
                found = found + words_of_rows(place, inside, above_bits(FORMAT), IS_WHOLE, "evict_first")
            if is_folded(FORMAT, IN, GROUPS):
                for part in tl.static_range(folded_parts(FORMAT, IN, GROUPS)):
                    of_lane = tl.arange(0, 32 * WARPS) % 4 * _run(FORMAT) + part * (16 if LOADS == 1 else 64)
                    found = found + scale_and_shift(
                        scales_ptr, zeros_ptr, minima_ptr, steps_ptr, rows[i], (first + turn) * _TURN + of_lane, inside,
                        IN, GROUPS, FLOATS, FORMAT, IS_WHOLE,
                    )  # fmt: skip
            else:
                group = rows[i] * GROUPS + (first + turn) // (COUNT // GROUPS)
                if zeros_ptr is not None:
                    found += (read_tile(zeros_ptr + group, inside, not IS_WHOLE),)
                if by_group(FORMAT, GROUPS):
                    found += (read_tile(scales_ptr + group, inside, not IS_WHOLE),)
    return found


@triton.jit
def _add_chunk(
    sums: tl.tuple,
    chunk: tl.tuple,
    x_rows: tl.tuple,
    offsets: tl.tuple,
    first: tl.tensor,
    IN: tl.constexpr,
    GROUPS: tl.constexpr,
    FLOATS: tl.constexpr,
    FORMAT: tl.constexpr,
    TILES: tl.constexpr,
    TOKEN_BLOCK: tl.constexpr,
    WARPS: tl.constexpr,
    TURNS: tl.constexpr,
    KEPT: tl.constexpr,
) -> tl.tuple:
    """The sums with those of a chunk added."""
    COUNT: tl.constexpr = IN // _TURN
    IS_BF16: tl.constexpr = x_rows[0].dtype.element_ty == tl.bfloat16
    IN_BLOCKS: tl.constexpr = is_in_blocks(FORMAT, IN, FLOATS)
    # Values of a row in a chunk, for each turn or block.
    EACH: tl.constexpr = len(chunk) // (2 * TILES * (TURNS // 2 if IN_BLOCKS else TURNS))
    if IN_BLOCKS and TOKEN_BLOCK == 1:
        for k in tl.static_range(TURNS // 2):
            sums = add_block_of_token(
                sums, chunk, x_rows[0], offsets, first // 2 + k, first + 2 * k < COUNT, k, EACH, FORMAT, TILES,
                COUNT % (WARPS * TURNS) == 0, IS_BF16, WARPS, KEPT,
            )  # fmt: skip
    else:
        for turn in tl.static_range(TURNS):
            x: tl.tuple = ()
            for n in tl.static_range((TOKEN_BLOCK + 7) // 8):
                x = x + _x_words(x_rows[n], first, turn, COUNT, FORMAT, IN_BLOCKS, WARPS, TURNS)
            if is_folded(FORMAT, IN, GROUPS):
                rows = chunk[turn * 2 * TILES * EACH : (turn + 1) * 2 * TILES * EACH]
                if IN_BLOCKS:
                    rows = folded_rows(chunk, turn // 2, turn % 2, EACH, 2 * TILES, FORMAT)
                sums = add_folded(
                    sums, rows, x, FORMAT, folded_parts(FORMAT, IN, GROUPS), TILES, IS_BF16, WARPS
                )  # fmt: skip
            else:
                x_once = x
                if TOKEN_BLOCK == 1 and KEPT == 2:
                    place = x_rows[1] + (first + turn) * _TURN
                    x_once = words_of_rows(place, first + turn < COUNT, 2, COUNT % (WARPS * TURNS) == 0, "")
                sums = add_turn(
                    sums, chunk, x, x_once, offsets, turn * TILES, EACH, FORMAT, by_group(FORMAT, GROUPS), TILES,
                    TOKEN_BLOCK, IS_BF16, WARPS, KEPT,
                )  # fmt: skip
    return sums


@triton.jit
def _x_words(
    x_row: tl.tensor,
    first: tl.tensor,
    TURN: tl.constexpr,
    COUNT: tl.constexpr,
    FORMAT: tl.constexpr,
    IN_BLOCKS: tl.constexpr,
    WARPS: tl.constexpr,
    TURNS: tl.constexpr,
) -> tl.tuple:
    """16 words of x, in the order in which a turn's channels are multiplied. TURN: of a chunk, which begins at the
    first turn."""
    IS_WHOLE: tl.constexpr = COUNT % (WARPS * TURNS) == 0
    RUN: tl.constexpr = _run(FORMAT)
    OFFSET: tl.constexpr = TURN // 2 * 256 + TURN % 2 * 32 if IN_BLOCKS else TURN * _TURN
    x: tl.tuple = ()
    for j in tl.static_range(4):
        place = x_row + (first * _TURN + (OFFSET + 8 * j // RUN * (4 * RUN) + 8 * j % RUN))
        x = x + words_of_rows(place, first + TURN < COUNT, 4, IS_WHOLE, "")
    return x


@triton.jit
def _tile(
    sums: tl.tuple,
    FIRST: tl.constexpr,
    TILES: tl.constexpr,
    TOKEN_BLOCK: tl.constexpr,
    WARPS: tl.constexpr,
    KEPT: tl.constexpr,
    FOLDED: tl.constexpr,
    BY_LANE: tl.constexpr,
) -> tl.tensor:
    """[16·TILES, TOKEN_BLOCK], the sums of TILES from the FIRST on, added up over the warps; of one token four times
    the same, or BY_LANE the KEPT sums of four lanes, [16·TILES, 4·KEPT]."""
    COLUMNS: tl.constexpr = (TOKEN_BLOCK + 7) // 8
    COUNT: tl.constexpr = COLUMNS * TILES * 2 * KEPT
    parts: tl.tuple = ()
    for k in tl.static_range(COUNT):
        parts += (sums[FIRST * COLUMNS * 2 * KEPT + k],)
    # Joined from the highest bit of a place to the lowest.
    for level in tl.static_range(_log2(COUNT)):
        pairs: tl.tuple = ()
        for i in tl.static_range(COUNT // 2 >> level):
            pairs += (tl.join(parts[i], parts[(COUNT // 2 >> level) + i]),)
        parts = pairs
    whole = tl.sum(parts[0].reshape(WARPS, 32, COUNT), 0).reshape(8, 4, TILES, COLUMNS, 2, KEPT)
    whole = whole.permute(2, 4, 0, 3, 1, 5)
    if TOKEN_BLOCK == 1 and KEPT == 2 and not BY_LANE:
        codes, others = whole.reshape(TILES * 16, 4, 2).split()
        return codes if FOLDED else codes + tl.sum(others, 1)[:, None]
    else:
        return whole.reshape(TILES * 16, COLUMNS * 4 * KEPT)


@triton.constexpr_function
def _log2(number: int) -> int:
    return number.bit_length() - 1


code_narrow_budget = Budget(
    "code_narrow_kernel",
    (
        *STREAMING,
        *EDGE_FREE,
        Limit("shared_accesses", "codes become operands in the registers that they were loaded into", at_most=0),
        Limit("barriers", "warps that wait for each other leave the memory idle", at_most=0),
        Limit("conversions", "a conversion takes four times as long to issue as an operation on bits", at_most=0),
    ),
    streams=("codes_ptr",),
)
