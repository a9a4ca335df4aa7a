"""Products of many tokens with quantized weights on the matrix units: yᵀ = W·xᵀ, codes made numbers in registers.

W is the left operand, which matrix units read from registers: its codes are read once per tile of tokens, and decoded
values are never written to memory. Codes are exact in the operands' type, and scales multiply the sums of each group of
columns, so that nothing is rounded before the fp32 sums. int8 or fp8 codes of x use the matrix units for these types.
If x has a scale per 32 channels, that multiplies the sums of these channels.
If few programs would be busy, SPLITS of them share a tile as in dense_narrow.py.
"""

import triton
import triton.language as tl

from llmc.codegen.triton.kernels.interpreted import INTERPRETED
from llmc.codegen.triton.kernels.launch_edge import ask_for_lines, wait_for_launch_before
from llmc.codegen.triton.kernels.products.dense_tile import tile_of
from llmc.codegen.triton.kernels.products.format_facts import by_group, halves, in_pairs
from llmc.codegen.triton.kernels.products.group_scales import scale_and_minimum, second_group
from llmc.codegen.triton.kernels.products.operand_tiles import multiply, read_tile
from llmc.codegen.triton.kernels.products.product_store import store_product, store_split_product
from llmc.codegen.triton.kernels.products.sparse_tile import first_elements, sparse_tile
from llmc.codegen.triton.kernels.products.weight_codes import (
    code_values,
    e4m3_values,
    high_codes,
    load_above,
    load_codes,
    low_codes,
    signed_codes,
    small_floats,
)
from llmc.codegen.triton.machine_code.budget import EDGE_FREE, STREAMING, Budget

# The scales of a group of channels are of this number of tokens or a multiple.
TILE_SCALES = 16
_SCALES = tl.constexpr(TILE_SCALES)


@triton.jit
def code_tile_kernel(
    x_ptr: tl.tensor,
    x_row_stride: int,
    x_scales_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    zeros_ptr: tl.tensor,
    minima_ptr: tl.tensor,
    steps_ptr: tl.tensor,
    masks_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    delta_row_stride: int,
    adapters_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    residual_row_stride: int,
    y_ptr: tl.tensor,
    y_row_stride: int,
    partials_ptr: tl.tensor,
    arrivals_ptr: tl.tensor,
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
    OPERANDS: tl.constexpr,
    TOKEN_BLOCK: tl.constexpr,
    OUT_BLOCK: tl.constexpr,
    BYTE_BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    GROUP: tl.constexpr,
    LINES_AHEAD: tl.constexpr,
) -> None:
    """Program (n, s): the n-th tile [OUT_BLOCK, TOKEN_BLOCK] over the s-th part of IN, BYTE_BLOCK of W's bytes a turn.

    OPERANDS: int8, fp8, or the float type that the matrix units multiply. GROUP: of token tiles, as in dense_tile.py.
    LINES_AHEAD: how many lines of each row of W are requested before x is there.
    """
    token_tile, out_tile = tile_of(tl.program_id(0), tl.cdiv(tokens, TOKEN_BLOCK), tl.cdiv(OUT, OUT_BLOCK), GROUP)
    first_token, first_out = token_tile.to(tl.int64) * TOKEN_BLOCK, out_tile.to(tl.int64) * OUT_BLOCK
    split = tl.program_id(1)
    out, token = tl.arange(0, OUT_BLOCK), tl.arange(0, TOKEN_BLOCK)
    # Rows past the end repeat the last one, so that no load needs a mask for them.
    row = tl.minimum(first_out + out, OUT - 1)
    x_token = tl.minimum(first_token + token, tokens - 1)
    x_row = x_ptr + x_token[None, :] * x_row_stride
    # A multiple of 16, so that loads of neighbours are vectors.
    x_scales = tl.cdiv(tokens, _SCALES) * _SCALES
    IN_PAIRS: tl.constexpr = in_pairs(FORMAT)
    IN_GROUPS: tl.constexpr = by_group(FORMAT, GROUPS)
    PLACES: tl.constexpr = (IN + 31) // 32 * 16 if IN_PAIRS else ROW_BYTES
    COUNT: tl.constexpr = (PLACES + BYTE_BLOCK - 1) // BYTE_BLOCK
    PER_SPLIT: tl.constexpr = (COUNT + SPLITS - 1) // SPLITS
    # Where each half of a turn's channels is a group, `group` counts pairs of them.
    PER_GROUP: tl.constexpr = 1 if halves(FORMAT, IN, GROUPS) else COUNT // GROUPS
    MASKED: tl.constexpr = IN % (BYTE_BLOCK * (2 if IN_PAIRS else 1)) != 0
    # Without groups integers are summed as such to the end.
    SUMS: tl.constexpr = tl.int32 if OPERANDS == "int8" and not IN_GROUPS and X_GROUPS == 1 else tl.float32
    if LINES_AHEAD > 0:
        ask_for_lines(codes_ptr + row * ROW_BYTES + split * PER_SPLIT * BYTE_BLOCK, LINES_AHEAD)
        if GATED:
            ask_for_lines(codes_ptr + (row + OUT) * ROW_BYTES + split * PER_SPLIT * BYTE_BLOCK, LINES_AHEAD)
        wait_for_launch_before()
    product = tl.zeros([OUT_BLOCK, TOKEN_BLOCK], dtype=SUMS)
    up = tl.zeros([OUT_BLOCK, TOKEN_BLOCK], dtype=SUMS)
    first, first_up = row, row
    if masks_ptr is not None:
        first = first_elements(masks_ptr, starts_ptr, row, split * PER_SPLIT * BYTE_BLOCK, IN)
        if GATED:
            first_up = first_elements(masks_ptr, starts_ptr, row + OUT, split * PER_SPLIT * BYTE_BLOCK, IN)
    for chunk in range(split * PER_SPLIT, tl.minimum((split + 1) * PER_SPLIT, COUNT)):
        place = chunk * BYTE_BLOCK + tl.arange(0, BYTE_BLOCK)
        channel = place // 16 * 32 + place % 16 if IN_PAIRS else place
        x_low = x_operand(x_row, channel, IN, X_FORMAT, OPERANDS, MASKED)
        x_high = x_low
        if IN_PAIRS:
            x_high = x_operand(x_row, channel + 16, IN, X_FORMAT, OPERANDS, MASKED)
        x_scale = None
        if X_GROUPS > 1:
            x_scale = read_tile(
                x_scales_ptr + (chunk * x_scales + first_token) + token, token < x_scales - first_token, True
            )
        product, first = add_chunk(
            product, x_low, x_high, x_scale, codes_ptr, scales_ptr, zeros_ptr, minima_ptr, steps_ptr, masks_ptr, first,
            row, chunk * BYTE_BLOCK, place, chunk // PER_GROUP, IN, FORMAT, ROW_BYTES, PLACES, GROUPS, FLOATS, X_GROUPS,
            OPERANDS, MASKED,
        )  # fmt: skip
        if GATED:
            up, first_up = add_chunk(
                up, x_low, x_high, x_scale, codes_ptr, scales_ptr, zeros_ptr, minima_ptr, steps_ptr, masks_ptr,
                first_up, row + OUT, chunk * BYTE_BLOCK, place, chunk // PER_GROUP, IN, FORMAT, ROW_BYTES, PLACES,
                GROUPS, FLOATS, X_GROUPS, OPERANDS, MASKED,
            )  # fmt: skip
    product, up = product.to(tl.float32), up.to(tl.float32)
    if not IN_GROUPS:
        product *= tl.load(scales_ptr + row).to(tl.float32)[:, None]
        if GATED:
            up *= tl.load(scales_ptr + row + OUT).to(tl.float32)[:, None]
    if X_FORMAT != "none" and X_GROUPS == 1:
        x_scale = tl.load(x_scales_ptr + x_token)[None, :]
        product, up = product * x_scale, up * x_scale
    if SPLITS == 1:
        store_product(
            product, up, first_token, first_out, token[None, :], out[:, None], tokens,
            bias_ptr, delta_ptr, delta_row_stride, adapters_ptr, residual_ptr, residual_row_stride,
            y_ptr, y_row_stride, scale, OUT, GATED, ACTIVATION,
        )  # fmt: skip
    else:
        store_split_product(
            product, up, split, tl.program_id(0), partials_ptr, arrivals_ptr,
            first_token, first_out, token[None, :], out[:, None], tokens,
            bias_ptr, delta_ptr, delta_row_stride, adapters_ptr, residual_ptr, residual_row_stride,
            y_ptr, y_row_stride, scale, OUT, GATED, ACTIVATION, SPLITS,
        )  # fmt: skip


@triton.jit
def add_chunk(
    sums: tl.tensor,
    x_low: tl.tensor,
    x_high: tl.tensor,
    x_scale: tl.tensor,
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    zeros_ptr: tl.tensor,
    minima_ptr: tl.tensor,
    steps_ptr: tl.tensor,
    masks_ptr: tl.tensor,
    first: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    place: tl.tensor,
    group: tl.tensor,
    IN: tl.constexpr,
    FORMAT: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    PLACES: tl.constexpr,
    GROUPS: tl.constexpr,
    FLOATS: tl.constexpr,
    X_GROUPS: tl.constexpr,
    OPERANDS: tl.constexpr,
    MASKED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The sums with a chunk of channels added, all of one group, or each half of one, its scales included if there are
    several; and of codes behind masks where the next chunk's begin. first: where those of the chunk's first column do.
    x_scale: of the chunk's channels of each token, if X_GROUPS is not 1.
    """
    IN_PAIRS: tl.constexpr = in_pairs(FORMAT)
    IN_GROUPS: tl.constexpr = by_group(FORMAT, GROUPS) or X_GROUPS > 1
    if masks_ptr is not None:
        codes, first = sparse_tile(codes_ptr, masks_ptr, first, row, column, IN, place.shape[0])
    else:
        is_code = (place < PLACES)[None, :] & (row >= 0)[:, None]
        codes = load_codes(codes_ptr + row[:, None] * ROW_BYTES, place[None, :], is_code, FORMAT, MASKED)
    inside = (place < PLACES)[None, :]
    above = load_above(codes_ptr + row[:, None] * ROW_BYTES, place[None, :], inside, PLACES, FORMAT, MASKED)
    HALVES: tl.constexpr = halves(FORMAT, IN, GROUPS)
    zeros = tl.zeros([row.shape[0], 1], dtype=tl.int32)
    if zeros_ptr is not None:
        zeros = tl.load(zeros_ptr + row * GROUPS + group * (2 if HALVES else 1)).to(tl.int32)[:, None]
    part = tl.zeros(sums.shape, dtype=tl.int32 if OPERANDS == "int8" else tl.float32) if IN_GROUPS else sums
    low = _operand(low_codes(codes, above, FORMAT), codes, zeros, FORMAT, OPERANDS)
    if HALVES:
        sums = _add_group(
            sums, _multiply(low, x_low, part, OPERANDS), x_low, x_scale, scales_ptr, minima_ptr, steps_ptr, row,
            group * 2, GROUPS, FLOATS, X_GROUPS, FORMAT,
        )  # fmt: skip
        second = second_group(group * 2, IN, GROUPS)
        if zeros_ptr is not None:
            zeros = tl.load(zeros_ptr + row * GROUPS + second).to(tl.int32)[:, None]
        high = _operand(high_codes(codes, above, FORMAT), codes, zeros, FORMAT, OPERANDS)
        sums = _add_group(
            sums, _multiply(high, x_high, part, OPERANDS), x_high, x_scale, scales_ptr, minima_ptr, steps_ptr, row,
            second, GROUPS, FLOATS, X_GROUPS, FORMAT,
        )  # fmt: skip
        return sums, first
    else:
        part = _multiply(low, x_low, part, OPERANDS)
        x = x_low
        if IN_PAIRS:
            high = _operand(high_codes(codes, above, FORMAT), codes, zeros, FORMAT, OPERANDS)
            part = _multiply(high, x_high, part, OPERANDS)
        if IN_GROUPS:
            if minima_ptr is not None:
                x = x_low.to(tl.float32) + x_high.to(tl.float32)
            part = _add_group(
                sums, part, x, x_scale, scales_ptr, minima_ptr, steps_ptr, row, group, GROUPS, FLOATS, X_GROUPS, FORMAT
            )
        return part, first


@triton.jit
def _add_group(
    sums: tl.tensor,
    part: tl.tensor,
    x: tl.tensor,
    x_scale: tl.tensor,
    scales_ptr: tl.tensor,
    minima_ptr: tl.tensor,
    steps_ptr: tl.tensor,
    row: tl.tensor,
    group: tl.tensor,
    GROUPS: tl.constexpr,
    FLOATS: tl.constexpr,
    X_GROUPS: tl.constexpr,
    FORMAT: tl.constexpr,
) -> tl.tensor:
    """sums + scale · Σ code · x - minimum · Σ x, of a group's channels. part: Σ code · x. x: its channels, or sums of
    several of them, along the first axis; times x_scale, if X_GROUPS is not 1. Without minima, `scale` of a format with
    one group per row is left to the end."""
    part = small_floats(part) if part.dtype == tl.int32 else part
    if X_GROUPS > 1:
        part *= x_scale[None, :]
    if by_group(FORMAT, GROUPS):
        scale, minimum = scale_and_minimum(
            scales_ptr, minima_ptr, steps_ptr, row, group, row >= 0, GROUPS, FLOATS, FORMAT, False
        )
        sums += part * scale[:, None]
        if minima_ptr is not None:
            total = tl.sum(x.to(tl.float32), axis=0)
            if X_GROUPS > 1:
                total *= x_scale
            sums -= minimum[:, None] * total[None, :]
        return sums
    else:
        return sums + part


@triton.jit
def _operand(
    integers: tl.tensor, codes: tl.tensor, zeros: tl.tensor, FORMAT: tl.constexpr, OPERANDS: tl.constexpr
) -> tl.tensor:
    """Codes as the matrix units multiply them. codes: the bytes; integers: what is taken from them."""
    if OPERANDS == "fp8":
        return codes.to(tl.float8e4nv, bitcast=True)
    elif OPERANDS == "int8" and FORMAT == "int8":
        return codes
    elif OPERANDS == "int8":
        return (signed_codes(integers, FORMAT) - zeros).to(tl.int8)
    else:
        return _as_float(code_values(integers, zeros.to(tl.float32), FORMAT), OPERANDS)


@triton.jit
def x_operand(
    x_row: tl.tensor,
    channel: tl.tensor,
    IN: tl.constexpr,
    X_FORMAT: tl.constexpr,
    OPERANDS: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """A tile of xᵀ as the matrix units multiply it."""
    x = read_tile(x_row + channel[:, None], (channel < IN)[:, None], MASKED)
    if OPERANDS == "fp8":
        return x.to(tl.float8e4nv, bitcast=True)
    elif OPERANDS == "int8" or X_FORMAT == "none":
        return x
    elif X_FORMAT == "fp8":
        return _as_float(e4m3_values(x.to(tl.int32)), OPERANDS)
    else:
        return _as_float(x.to(tl.float32), OPERANDS)


@triton.jit
def _as_float(values: tl.tensor, OPERANDS: tl.constexpr) -> tl.tensor:
    if OPERANDS == "fp16":
        return values.to(tl.float16)
    elif OPERANDS == "bf16":
        return values.to(tl.bfloat16)
    else:
        tl.static_assert(OPERANDS == "fp32", "unknown operands")
        return values


@triton.jit
def _multiply(a: tl.tensor, b: tl.tensor, total: tl.tensor, OPERANDS: tl.constexpr) -> tl.tensor:
    """total + a·b. fp32 is multiplied as such, not as tf32; fp8 is summed in fp32 after 128 products at most.

    The matrix units of Hopper add fp8 products with 14 bits. max_num_imprecise_acc would also make Triton add their
    sums in fp32, but before it waits for them.
    """
    # Triton 3.7 also compiles code after a return: each case has a branch.
    if OPERANDS == "int8":
        return tl.dot(a, b, total, out_dtype=tl.int32)
    elif OPERANDS == "fp8" and not INTERPRETED:
        tl.static_assert(a.shape[1] <= 128, "the sums of more products have too few bits")
        return total + tl.dot(a, b)
    else:
        return multiply(a, b, total)


code_tile_budget = Budget("code_tile_kernel", (*STREAMING, *EDGE_FREE), streams=("codes_ptr",))
