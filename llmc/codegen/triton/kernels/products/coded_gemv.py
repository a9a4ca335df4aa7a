"""Products of one to four tokens with quantized weights: y[t] = W·x[t], bound by reading W's codes once.

A program computes OUT_BLOCK outputs of all tokens. Its threads are spread along IN and read 16 bytes of codes each,
which are decoded exactly in registers; x and the scales stay in the L1 cache. The epilogue is the same as for other
products. x may also be codes, with a scale per token or per 32 channels of a token; W's codes may be stored without
zeros.
"""

import triton
import triton.language as tl

from llmc.codegen.triton.kernels.launch_edge import ask_for_lines, wait_for_launch_before
from llmc.codegen.triton.kernels.products.format_facts import by_group, halves, in_pairs, is_blocked
from llmc.codegen.triton.kernels.products.group_scales import scale_and_minimum, second_group
from llmc.codegen.triton.kernels.products.operand_tiles import read_tile
from llmc.codegen.triton.kernels.products.product_store import store_product
from llmc.codegen.triton.kernels.products.sparse_tile import first_elements, sparse_tile
from llmc.codegen.triton.kernels.products.weight_codes import (
    code_values,
    e4m3_values,
    high_codes,
    load_above,
    load_codes,
    low_codes,
    small_floats,
)
from llmc.codegen.triton.machine_code.budget import EDGE_FREE, STREAMING, Budget, Limit


@triton.jit
def code_gemv_kernel(
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
    TOKENS: tl.constexpr,
    OUT_BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK_BYTES: tl.constexpr,
    LINES_AHEAD: tl.constexpr,
) -> None:
    """Program (j, i): the j-th OUT_BLOCK outputs of the i-th TOKENS tokens. Sums in fp32.

    CHUNK_BYTES: of a row's codes, or of their low bits, that share a scale; CHUNKS of them at a time. X_GROUPS: scales
    of a token. LINES_AHEAD: how many lines of each row of W are requested before x is there.
    """
    first_out, first_token = tl.program_id(0).to(tl.int64) * OUT_BLOCK, tl.program_id(1).to(tl.int64) * TOKENS
    out, token = tl.arange(0, OUT_BLOCK), tl.arange(0, TOKENS)
    # Rows past the end repeat the last one, so that no load needs a mask for them.
    row = tl.minimum(first_out + out, OUT - 1)
    if LINES_AHEAD > 0:
        ask_for_lines(codes_ptr + row * ROW_BYTES, LINES_AHEAD)
        if GATED:
            ask_for_lines(codes_ptr + (row + OUT) * ROW_BYTES, LINES_AHEAD)
        wait_for_launch_before()
    x_token = tl.minimum(first_token + token, tokens - 1)
    x_row = x_ptr + x_token[:, None, None, None] * x_row_stride
    x_scales_row = x_row
    if X_GROUPS > 1:
        x_scales_row = x_scales_ptr + x_token[:, None, None, None]
    product = _sums(
        x_row, x_scales_row, tokens, codes_ptr, scales_ptr, zeros_ptr, minima_ptr, steps_ptr, masks_ptr, starts_ptr,
        row, IN, FORMAT, X_FORMAT, ROW_BYTES, GROUPS, FLOATS, X_GROUPS, TOKENS, OUT_BLOCK, CHUNKS, CHUNK_BYTES,
    )  # fmt: skip
    up = product
    if GATED:
        up = _sums(
            x_row, x_scales_row, tokens, codes_ptr, scales_ptr, zeros_ptr, minima_ptr, steps_ptr, masks_ptr, starts_ptr,
            row + OUT, IN, FORMAT, X_FORMAT, ROW_BYTES, GROUPS, FLOATS, X_GROUPS, TOKENS, OUT_BLOCK, CHUNKS,
            CHUNK_BYTES,
        )  # fmt: skip
    if X_FORMAT != "none" and X_GROUPS == 1:
        x_scale = tl.load(x_scales_ptr + x_token)[:, None]
        product, up = product * x_scale, up * x_scale
    store_product(
        product, up, first_token, first_out, token[:, None], out[None, :], tokens,
        bias_ptr, delta_ptr, delta_row_stride, adapters_ptr, residual_ptr, residual_row_stride,
        y_ptr, y_row_stride, scale, OUT, GATED, ACTIVATION,
    )  # fmt: skip


@triton.jit
def _sums(
    x_row: tl.tensor,
    x_scales_row: tl.tensor,
    tokens: int,
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    zeros_ptr: tl.tensor,
    minima_ptr: tl.tensor,
    steps_ptr: tl.tensor,
    masks_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    row: tl.tensor,
    IN: tl.constexpr,
    FORMAT: tl.constexpr,
    X_FORMAT: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    GROUPS: tl.constexpr,
    FLOATS: tl.constexpr,
    X_GROUPS: tl.constexpr,
    TOKENS: tl.constexpr,
    OUT_BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK_BYTES: tl.constexpr,
) -> tl.tensor:
    """W·x of the rows, [TOKENS, OUT_BLOCK]."""
    IN_PAIRS: tl.constexpr = in_pairs(FORMAT)
    IN_GROUPS: tl.constexpr = by_group(FORMAT, GROUPS)
    X_IN_GROUPS: tl.constexpr = X_GROUPS > 1
    BLOCKED: tl.constexpr = is_blocked(FORMAT)
    HALVES: tl.constexpr = halves(FORMAT, IN, GROUPS)
    # Chunks of a row, and of a group of columns with one scale.
    PLACES: tl.constexpr = (IN + 31) // 32 * 16 if IN_PAIRS else ROW_BYTES
    COUNT: tl.constexpr = (PLACES + CHUNK_BYTES - 1) // CHUNK_BYTES
    tl.static_assert(not X_IN_GROUPS or COUNT == X_GROUPS, "a chunk's channels share a scale of x")
    PER_GROUP: tl.constexpr = 1 if HALVES else COUNT // GROUPS
    MASKED: tl.constexpr = COUNT % CHUNKS != 0 or IN % (CHUNK_BYTES * (2 if IN_PAIRS else 1)) != 0
    chunk, byte = tl.arange(0, CHUNKS)[None, None, :, None], tl.arange(0, CHUNK_BYTES)[None, None, None, :]
    first, of_out = row, row
    if masks_ptr is not None:
        first = first_elements(masks_ptr, starts_ptr, of_out, 0, IN)
    row = row[None, :, None, None]
    row_zeros = tl.zeros([1, OUT_BLOCK, 1, 1], dtype=tl.float32)
    if zeros_ptr is not None and not IN_GROUPS:
        row_zeros = tl.load(zeros_ptr + row).to(tl.float32)
    sums = tl.zeros([TOKENS, OUT_BLOCK, CHUNKS, CHUNK_BYTES], dtype=tl.float32)
    for start in range(0, COUNT, CHUNKS):
        place = (start + chunk) * CHUNK_BYTES + byte
        channel = place // 16 * 32 + place % 16 if IN_PAIRS else place
        if masks_ptr is not None:
            codes, first = sparse_tile(
                codes_ptr, masks_ptr, first, of_out, start * CHUNK_BYTES, IN, CHUNKS * CHUNK_BYTES
            )
            codes = codes.reshape(1, OUT_BLOCK, CHUNKS, CHUNK_BYTES)
        else:
            codes = load_codes(codes_ptr + row * ROW_BYTES, place, place < PLACES, FORMAT, MASKED)
        above = load_above(codes_ptr + row * ROW_BYTES, place, place < PLACES, PLACES, FORMAT, MASKED)
        zeros = row_zeros
        if IN_GROUPS:
            group = (start + chunk) // PER_GROUP
            is_group = (row >= 0) & (start + chunk < COUNT)
            if HALVES:
                group = (start + chunk) * 2
            scales, minima = scale_and_minimum(
                scales_ptr, minima_ptr, steps_ptr, row, group, is_group, GROUPS, FLOATS, FORMAT, True
            )
            if zeros_ptr is not None:
                zeros = tl.load(zeros_ptr + row * GROUPS + group, mask=is_group, other=0).to(tl.float32)
        x = _x_values(x_row, channel, IN, X_FORMAT, MASKED)
        weight = code_values(low_codes(codes, above, FORMAT), zeros, FORMAT)
        if BLOCKED:
            weight = weight * scales - minima
        part = x * weight
        if HALVES and not BLOCKED:
            part *= scales
        if IN_PAIRS:
            x = _x_values(x_row, channel + 16, IN, X_FORMAT, MASKED)
            if HALVES:
                second = second_group(group, IN, GROUPS)
                scales, minima = scale_and_minimum(
                    scales_ptr, minima_ptr, steps_ptr, row, second, is_group, GROUPS, FLOATS, FORMAT, True
                )
                if zeros_ptr is not None:
                    zeros = tl.load(zeros_ptr + row * GROUPS + second, mask=is_group, other=0).to(tl.float32)
            weight = code_values(high_codes(codes, above, FORMAT), zeros, FORMAT)
            if BLOCKED:
                weight = weight * scales - minima
            if HALVES and not BLOCKED:
                part += x * weight * scales
            else:
                part += x * weight
        if IN_GROUPS and not BLOCKED and not HALVES:
            part *= scales
        if X_IN_GROUPS:
            part *= read_tile(x_scales_row + (start + chunk) * tokens, start + chunk < COUNT, MASKED)
        sums += part
    total = tl.sum(tl.sum(sums, axis=3), axis=2)
    if not IN_GROUPS:
        total *= tl.load(scales_ptr + row.reshape(1, OUT_BLOCK)).to(tl.float32)
    return total


@triton.jit
def _x_values(
    x_row: tl.tensor, channel: tl.tensor, IN: tl.constexpr, X_FORMAT: tl.constexpr, MASKED: tl.constexpr
) -> tl.tensor:
    """x, or what its codes stand for before they are scaled, in fp32."""
    x = read_tile(x_row + channel, channel < IN, MASKED)
    if X_FORMAT == "fp8":
        return e4m3_values(x.to(tl.int32))
    elif X_FORMAT == "int8":
        return small_floats(x.to(tl.int32))
    else:
        return x.to(tl.float32)


code_gemv_budget = Budget(
    "code_gemv_kernel",
    (
        *STREAMING,
        *EDGE_FREE,
        Limit("shared_accesses", "codes become operands in the registers that they were loaded into", at_most=0),
        Limit("barriers", "warps that wait for each other leave the memory idle", at_most=0),
        Limit("conversions", "a conversion takes four times as long to issue as an operation on bits", at_most=0),
    ),
    streams=("codes_ptr",),
)
