"""Products of a few tokens with 4-bit weights on the matrix units: yᵀ = W·xᵀ, bound by reading W's codes once.

mma.sync takes its left operand from registers: element (row, channel) from a fixed lane. The order of channels within
a product is free if x has the same one. So a lane loads 16 bytes of a row, which are 32 neighbouring channels, and its
codes become operands where they are: a code is the mantissa of 128 + code in bf16, or of 1024 + code in fp16. These
offsets and W's zeros are subtracted from the sums of each group of channels, with sums of x from the same units.

A block has OUT_BLOCK rows of W, its warps divide IN, and their sums meet in shared memory at the end.
"""

import triton
import triton.language as tl

from llmc.codegen.triton.kernels.products.format_facts import stored_zero
from llmc.codegen.triton.kernels.products.matrix_words import (
    issue_loads,
    matrix_sums,
    pairs_of_word,
    permuted_bytes,
    words_of_rows,
)
from llmc.codegen.triton.kernels.products.operand_tiles import read_tile
from llmc.codegen.triton.kernels.products.product_store import store_product
from llmc.codegen.triton.kernels.products.weight_codes import small_floats
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
) -> None:
    """Program (j, i): the j-th OUT_BLOCK outputs of the i-th TOKEN_BLOCK tokens. Sums in fp32.

    WARPS: of a block. TURNS: of 128 channels, that a warp loads before it multiplies.
    """
    tl.static_assert(FORMAT == "int4" and X_FORMAT == "none", "other codes need other operands")
    first_out, first_token = tl.program_id(0).to(tl.int64) * OUT_BLOCK, tl.program_id(1).to(tl.int64) * TOKEN_BLOCK
    sums = _lane_sums(
        x_ptr, x_row_stride, codes_ptr, scales_ptr, zeros_ptr, first_token, first_out, tokens,
        IN, OUT, GATED, ROW_BYTES, GROUPS, TOKEN_BLOCK, OUT_BLOCK, WARPS, TURNS,
    )  # fmt: skip
    TILES: tl.constexpr = OUT_BLOCK // _ROWS
    product = _tile(sums, 0, TILES, TILES * 2 if GATED else TILES, TOKEN_BLOCK, WARPS)
    up = product
    if GATED:
        up = _tile(sums, TILES, TILES, TILES * 2, TOKEN_BLOCK, WARPS)
    out, token = tl.arange(0, OUT_BLOCK), tl.arange(0, 4 if TOKEN_BLOCK == 1 else TOKEN_BLOCK)
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
    first_token: tl.tensor,
    first_out: tl.tensor,
    tokens: int,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    GATED: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    GROUPS: tl.constexpr,
    TOKEN_BLOCK: tl.constexpr,
    OUT_BLOCK: tl.constexpr,
    WARPS: tl.constexpr,
    TURNS: tl.constexpr,
) -> tl.tuple:
    """Each thread's sums over its warp's channels: for every 8 tokens, every 16 rows of W, and then of the gate's
    partners, those of a matrix instruction; of one token only the first of each row."""
    TILES: tl.constexpr = OUT_BLOCK // _ROWS * (2 if GATED else 1)
    COLUMNS: tl.constexpr = (TOKEN_BLOCK + 7) // 8
    KEPT: tl.constexpr = min(TOKEN_BLOCK, 2)
    COUNT: tl.constexpr = IN // _TURN
    CHUNKS: tl.constexpr = (COUNT + WARPS * TURNS - 1) // (WARPS * TURNS)
    thread = tl.arange(0, 32 * WARPS)
    of_row, of_column, first = thread % 32 // 4, thread % 4, thread // 32 * (CHUNKS * TURNS)
    code_rows: tl.tuple = ()
    scale_rows: tl.tuple = ()
    x_rows: tl.tuple = ()
    sums: tl.tuple = ()
    for i in tl.static_range(2 * TILES):
        row = first_out + i % (OUT_BLOCK // 8) * 8 + of_row
        # Rows past the end repeat the last one, so that no load needs a mask for them.
        row = row if OUT % OUT_BLOCK == 0 else tl.minimum(row, OUT - 1)
        row += (i // (OUT_BLOCK // 8)) * OUT
        code_rows += (codes_ptr + (row * ROW_BYTES + of_column * 16),)
        scale_rows += (row * GROUPS,)
    for n in tl.static_range(COLUMNS):
        token = tl.minimum(first_token + n * _TOKENS + of_row, tokens - 1)
        x_rows += (x_ptr + (token * x_row_stride + of_column * 32),)
    for _ in tl.static_range(TILES * COLUMNS * 2 * KEPT):
        sums += (tl.zeros([32 * WARPS], tl.float32),)
    for _ in range(CHUNKS):
        chunk = _load_chunk(code_rows, scales_ptr, zeros_ptr, scale_rows, first, COUNT, GROUPS, TILES, WARPS, TURNS)
        issue_loads(first)
        sums = _add_chunk(sums, chunk, x_rows, first, COUNT, TILES, TOKEN_BLOCK, WARPS, TURNS)
        first += TURNS
    return sums


@triton.jit
def _load_chunk(
    code_rows: tl.tuple,
    scales_ptr: tl.tensor,
    zeros_ptr: tl.tensor,
    scale_rows: tl.tuple,
    first: tl.tensor,
    COUNT: tl.constexpr,
    GROUPS: tl.constexpr,
    TILES: tl.constexpr,
    WARPS: tl.constexpr,
    TURNS: tl.constexpr,
) -> tl.tuple:
    """Load what TURNS times 128 channels from 128·first on have of each row of a thread: four words of codes, the
    scale, and the zero if there are any. Scales past the end are 0."""
    IS_WHOLE: tl.constexpr = COUNT % (WARPS * TURNS) == 0
    found: tl.tuple = ()
    for turn in tl.static_range(TURNS):
        inside = first + turn < COUNT
        for i in tl.static_range(2 * TILES):
            place = code_rows[i] + (first + turn) * (_TURN // 2)
            found = found + words_of_rows(place, inside, IS_WHOLE, "evict_first")
            group = scale_rows[i] + (first + turn) // (COUNT // GROUPS)
            found += (read_tile(scales_ptr + group, inside, not IS_WHOLE),)
            if zeros_ptr is not None:
                found += (read_tile(zeros_ptr + group, inside, not IS_WHOLE),)
    return found


@triton.jit
def _add_chunk(
    sums: tl.tuple,
    chunk: tl.tuple,
    x_rows: tl.tuple,
    first: tl.tensor,
    COUNT: tl.constexpr,
    TILES: tl.constexpr,
    TOKEN_BLOCK: tl.constexpr,
    WARPS: tl.constexpr,
    TURNS: tl.constexpr,
) -> tl.tuple:
    """The sums with those of a chunk added."""
    IS_BF16: tl.constexpr = x_rows[0].dtype.element_ty == tl.bfloat16
    IS_WHOLE: tl.constexpr = COUNT % (WARPS * TURNS) == 0
    # Values of a row and turn in a chunk, and sums of a row that are kept.
    EACH: tl.constexpr = len(chunk) // (2 * TILES * TURNS)
    KEPT: tl.constexpr = min(TOKEN_BLOCK, 2)
    ones = tl.full([32 * WARPS], 0x3F803F80 if IS_BF16 else 0x3C003C00, tl.int32)
    nothing = tl.zeros([32 * WARPS], tl.float32)
    for turn in tl.static_range(TURNS):
        added: tl.tuple = ()
        for n in tl.static_range((TOKEN_BLOCK + 7) // 8):
            total = (nothing, nothing, nothing, nothing)
            x: tl.tuple = ()
            for j in tl.static_range(4):
                place = x_rows[n] + ((first + turn) * _TURN + 8 * j)
                x = x + words_of_rows(place, first + turn < COUNT, IS_WHOLE, "")
            for j in tl.static_range(8):
                total = matrix_sums(ones, ones, ones, ones, x[2 * j], x[2 * j + 1], total, IS_BF16, WARPS)
            for i in tl.static_range(TILES):
                part = _code_sums(chunk, x, 2 * (turn * TILES + i) * EACH, EACH, IS_BF16, WARPS)
                for half in tl.static_range(2):
                    scale, offset = _scale_and_offset(chunk, (2 * (turn * TILES + i) + half) * EACH, EACH, IS_BF16)
                    for k in tl.static_range(KEPT):
                        before = sums[((n * TILES + i) * 2 + half) * KEPT + k]
                        added += (before + scale * (part[2 * half + k] - offset * total[k]),)
        sums = added
    return sums


@triton.jit
def _code_sums(
    chunk: tl.tuple, x: tl.tuple, FIRST: tl.constexpr, EACH: tl.constexpr, IS_BF16: tl.constexpr, WARPS: tl.constexpr
) -> tl.tuple:
    """Sums of x times codes with their offset, of the rows whose words are at FIRST and EACH further in a chunk."""
    nothing = tl.zeros([32 * WARPS], tl.float32)
    part = (nothing, nothing, nothing, nothing)
    for j in tl.static_range(4):
        a, b = permuted_bytes(chunk[FIRST + j]), permuted_bytes(chunk[FIRST + EACH + j])
        for nibble in tl.static_range(2):
            part = matrix_sums(
                pairs_of_word(a, 4 * nibble, IS_BF16), pairs_of_word(b, 4 * nibble, IS_BF16),
                pairs_of_word(a, 4 * nibble + 8, IS_BF16), pairs_of_word(b, 4 * nibble + 8, IS_BF16),
                x[8 * nibble + 2 * j], x[8 * nibble + 2 * j + 1], part, IS_BF16, WARPS,
            )  # fmt: skip
    return part


@triton.jit
def _scale_and_offset(
    chunk: tl.tuple, FIRST: tl.constexpr, EACH: tl.constexpr, IS_BF16: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The scale of the row whose words are at FIRST, and what its codes have too much."""
    OFFSET: tl.constexpr = (128 if IS_BF16 else 1024) + stored_zero("int4")
    if EACH == 6:
        return chunk[FIRST + 4].to(tl.float32), small_floats(chunk[FIRST + 5].to(tl.int32)) + OFFSET
    else:
        return chunk[FIRST + 4].to(tl.float32), OFFSET + 0.0


@triton.jit
def _tile(
    sums: tl.tuple,
    FIRST: tl.constexpr,
    TILES: tl.constexpr,
    ALL_TILES: tl.constexpr,
    TOKEN_BLOCK: tl.constexpr,
    WARPS: tl.constexpr,
) -> tl.tensor:
    """[16·TILES, TOKEN_BLOCK], the sums of TILES from the FIRST on, added up over the warps; of one token four times
    the same, [16·TILES, 4]."""
    COLUMNS: tl.constexpr = (TOKEN_BLOCK + 7) // 8
    KEPT: tl.constexpr = min(TOKEN_BLOCK, 2)
    COUNT: tl.constexpr = COLUMNS * TILES * 2 * KEPT
    parts: tl.tuple = ()
    for n in tl.static_range(COLUMNS):
        for k in tl.static_range(TILES * 2 * KEPT):
            parts += (sums[(n * ALL_TILES + FIRST) * 2 * KEPT + k],)
    # Joined from the highest bit of a place to the lowest.
    for level in tl.static_range(_log2(COUNT)):
        pairs: tl.tuple = ()
        for i in tl.static_range(COUNT // 2 >> level):
            pairs += (tl.join(parts[i], parts[(COUNT // 2 >> level) + i]),)
        parts = pairs
    whole = tl.sum(parts[0].reshape(WARPS, 32, COUNT), 0).reshape(8, 4, COLUMNS, TILES, 2, KEPT)
    return whole.permute(3, 4, 0, 2, 1, 5).reshape(TILES * 16, COLUMNS * 4 * KEPT)


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
