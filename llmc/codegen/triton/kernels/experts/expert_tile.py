"""Products with those of many weights that each token was sent to: yᵀ = W[e]·xᵀ, in tiles of one expert's pairs each.

One launch for all experts: a program finds the expert of its tile in where each one's pairs begin (sort_pairs.py). W is
the left operand, as in coded_tile.py: its elements, or codes made numbers in registers, are read once for a tile of
pairs. x may also be codes, with a scale per row or per 32 channels of a row. The tiles are the same for every number of
tokens, so that a token's sums do not depend on its neighbours.
"""

import triton
import triton.language as tl

from llmc.codegen.triton.kernels.experts.sort_pairs import expert_of_tile
from llmc.codegen.triton.kernels.products.coded_tile import add_chunk, x_operand
from llmc.codegen.triton.kernels.products.format_facts import by_group, halves, in_pairs
from llmc.codegen.triton.kernels.products.operand_tiles import multiply, read_tile
from llmc.codegen.triton.machine_code.budget import STREAMING, Budget


@triton.jit
def expert_tile_kernel(
    x_ptr: tl.tensor,
    x_row_stride: int,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    y_ptr: tl.tensor,
    y_row_stride: int,
    pairs_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    tokens: int,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    SLOTS: tl.constexpr,
    X_SLOTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    PAIR_BLOCK: tl.constexpr,
    OUT_BLOCK: tl.constexpr,
    IN_BLOCK: tl.constexpr,
) -> None:
    """Program (n, i): OUT_BLOCK outputs from the n-th on of the i-th tile of PAIR_BLOCK pairs.

    X_SLOTS: rows of x for each token, one, or one for each slot.
    """
    expert, first, end = expert_of_tile(starts_ptr, tl.program_id(1), tokens * SLOTS, EXPERTS, PAIR_BLOCK)
    if expert <= EXPERTS:
        place = first + tl.arange(0, PAIR_BLOCK)
        pair = tl.load(pairs_ptr + tl.minimum(place, end - 1))
        out = tl.program_id(0) * OUT_BLOCK + tl.arange(0, OUT_BLOCK)
        product = tl.zeros([OUT_BLOCK, PAIR_BLOCK], dtype=tl.float32)
        if expert < EXPERTS:
            x_row = x_ptr + x_offset(pair, x_row_stride, IN, SLOTS, X_SLOTS)[None, :]
            # Rows past the end repeat the last one, so that no load needs a mask for them.
            row = expert.to(tl.int64) * OUT + tl.minimum(out, OUT - 1)
            weight_row = weight_ptr + row[:, None] * IN
            for start in range(0, IN, IN_BLOCK):
                channel = start + tl.arange(0, IN_BLOCK)
                x = read_tile(x_row + channel[:, None], (channel < IN)[:, None], IN % IN_BLOCK != 0)
                w = read_tile(weight_row + channel[None, :], (channel < IN)[None, :], IN % IN_BLOCK != 0)
                product = multiply(w, x, product)
            if bias_ptr is not None:
                product += tl.load(bias_ptr + row)[:, None]
        store_pairs(product, y_ptr, y_row_stride, pair, place < end, out, OUT, SLOTS)


@triton.jit
def expert_code_tile_kernel(
    x_ptr: tl.tensor,
    x_row_stride: int,
    x_scales_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    zeros_ptr: tl.tensor,
    minima_ptr: tl.tensor,
    steps_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    y_ptr: tl.tensor,
    y_row_stride: int,
    pairs_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    tokens: int,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    SLOTS: tl.constexpr,
    X_SLOTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    FORMAT: tl.constexpr,
    X_FORMAT: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    GROUPS: tl.constexpr,
    FLOATS: tl.constexpr,
    X_GROUPS: tl.constexpr,
    OPERANDS: tl.constexpr,
    PAIR_BLOCK: tl.constexpr,
    OUT_BLOCK: tl.constexpr,
    BYTE_BLOCK: tl.constexpr,
) -> None:
    """The same with weights in codes (coded_tile.py), BYTE_BLOCK of their bytes a turn.

    If x is codes, it is [rows, IN], a row for each token, or for each slot of one; x_scales_ptr: [rows, X_GROUPS].
    """
    expert, first, end = expert_of_tile(starts_ptr, tl.program_id(1), tokens * SLOTS, EXPERTS, PAIR_BLOCK)
    if expert <= EXPERTS:
        place = first + tl.arange(0, PAIR_BLOCK)
        pair = tl.load(pairs_ptr + tl.minimum(place, end - 1))
        out = tl.program_id(0) * OUT_BLOCK + tl.arange(0, OUT_BLOCK)
        product = tl.zeros([OUT_BLOCK, PAIR_BLOCK], dtype=tl.float32)
        if expert < EXPERTS:
            row = expert.to(tl.int64) * OUT + tl.minimum(out, OUT - 1)
            if X_FORMAT == "none":
                x_row, x_scale_row = x_ptr + x_offset(pair, x_row_stride, IN, SLOTS, X_SLOTS), None
            else:
                # Codes of all rows are equally far apart.
                x_place = (pair if X_SLOTS > 1 else pair // SLOTS).to(tl.int64)
                x_row, x_scale_row = x_ptr + x_place * x_row_stride, x_scales_ptr + x_place * X_GROUPS
            product = _code_sums(
                x_row, x_scale_row, codes_ptr, scales_ptr, zeros_ptr, minima_ptr, steps_ptr, row, IN, FORMAT, X_FORMAT,
                ROW_BYTES, GROUPS, FLOATS, X_GROUPS, OPERANDS, BYTE_BLOCK,
            )  # fmt: skip
            if bias_ptr is not None:
                product += tl.load(bias_ptr + row)[:, None]
        store_pairs(product, y_ptr, y_row_stride, pair, place < end, out, OUT, SLOTS)


@triton.jit
def _code_sums(
    x_row: tl.tensor,
    x_scale_row: tl.tensor,
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    zeros_ptr: tl.tensor,
    minima_ptr: tl.tensor,
    steps_ptr: tl.tensor,
    row: tl.tensor,
    IN: tl.constexpr,
    FORMAT: tl.constexpr,
    X_FORMAT: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    GROUPS: tl.constexpr,
    FLOATS: tl.constexpr,
    X_GROUPS: tl.constexpr,
    OPERANDS: tl.constexpr,
    BYTE_BLOCK: tl.constexpr,
) -> tl.tensor:
    """fp32 [rows of W, pairs], with all scales. x_row, x_scale_row: where each pair's x and its scales begin."""
    IN_PAIRS: tl.constexpr = in_pairs(FORMAT)
    IN_GROUPS: tl.constexpr = by_group(FORMAT, GROUPS)
    PLACES: tl.constexpr = (IN + 31) // 32 * 16 if IN_PAIRS else ROW_BYTES
    COUNT: tl.constexpr = (PLACES + BYTE_BLOCK - 1) // BYTE_BLOCK
    PER_GROUP: tl.constexpr = 1 if halves(FORMAT, IN, GROUPS) else COUNT // GROUPS
    MASKED: tl.constexpr = IN % (BYTE_BLOCK * (2 if IN_PAIRS else 1)) != 0
    # Without groups integers are summed as such to the end.
    SUMS: tl.constexpr = tl.int32 if OPERANDS == "int8" and not IN_GROUPS and X_GROUPS == 1 else tl.float32
    sums = tl.zeros([row.shape[0], x_row.shape[0]], dtype=SUMS)
    for chunk in range(0, COUNT):
        place = chunk * BYTE_BLOCK + tl.arange(0, BYTE_BLOCK)
        channel = place // 16 * 32 + place % 16 if IN_PAIRS else place
        x_low = x_operand(x_row[None, :], channel, IN, X_FORMAT, OPERANDS, MASKED)
        x_high = x_low
        if IN_PAIRS:
            x_high = x_operand(x_row[None, :], channel + 16, IN, X_FORMAT, OPERANDS, MASKED)
        x_scale = None
        if X_GROUPS > 1:
            x_scale = tl.load(x_scale_row + chunk)
        sums, _ = add_chunk(
            sums, x_low, x_high, x_scale, codes_ptr, scales_ptr, zeros_ptr, minima_ptr, steps_ptr, None, row, row,
            chunk * BYTE_BLOCK, place, chunk // PER_GROUP, IN, FORMAT, ROW_BYTES, PLACES, GROUPS, FLOATS, X_GROUPS,
            OPERANDS, MASKED,
        )  # fmt: skip
    product = sums.to(tl.float32)
    if not IN_GROUPS:
        product *= tl.load(scales_ptr + row).to(tl.float32)[:, None]
    if X_FORMAT != "none" and X_GROUPS == 1:
        product *= tl.load(x_scale_row)[None, :]
    return product


@triton.jit
def x_offset(
    pair: tl.tensor, x_row_stride: int, IN: tl.constexpr, SLOTS: tl.constexpr, X_SLOTS: tl.constexpr
) -> tl.tensor:
    """Where a pair's row of x begins, int64."""
    row = (pair // SLOTS).to(tl.int64) * x_row_stride
    return row + pair % SLOTS * IN if X_SLOTS > 1 else row


@triton.jit
def store_pairs(
    product: tl.tensor,
    y_ptr: tl.tensor,
    y_row_stride: int,
    pair: tl.tensor,
    is_pair: tl.tensor,
    out: tl.tensor,
    OUT: tl.constexpr,
    SLOTS: tl.constexpr,
) -> None:
    """A tile [OUT_BLOCK, PAIR_BLOCK] of sums, rounded once, to the rows of its pairs."""
    row = (pair // SLOTS).to(tl.int64) * y_row_stride + pair % SLOTS * OUT
    inside = (out < OUT)[:, None] & is_pair[None, :]
    tl.store(y_ptr + (row[None, :] + out[:, None]), product.to(y_ptr.dtype.element_ty), mask=inside)


# Which weights are read follows from the launch before: none can be loaded while it still runs.
expert_tile_budget = Budget("expert_tile_kernel", STREAMING, streams=("weight_ptr",))
expert_code_tile_budget = Budget("expert_code_tile_kernel", STREAMING, streams=("codes_ptr",))
