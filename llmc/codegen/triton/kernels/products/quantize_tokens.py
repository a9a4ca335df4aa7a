"""Tokens rounded to int8 or fp8 codes with a scale each, or one per group of channels, ahead of products of codes.

The codes are stored with their scales, or as the numbers that they stand for, in x's dtype: kernels for a few tokens
multiply those.

    scale[t] = max |x[t]| / largest (or a static one),   code = nearest(x / scale), ties to even, saturated

A NaN in a row or group makes its scale NaN (llmc/ops/token_codes.py): the maximum is taken over the bits, where NaN is
the greatest, because a floating-point maximum may ignore NaN. x may go through an RMS norm first; the result is rounded
to x's dtype, as by a separate norm. Memory-bound: reads T·C elements of x and writes one code each; later reads hit the
cache. A program takes a row.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl

from llmc.codegen.call import Call
from llmc.codegen.triton.kernel import DeviceLaunch, rows
from llmc.codegen.triton.kernels.products.coded_tile import TILE_SCALES
from llmc.codegen.triton.kernels.products.product import most_rows
from llmc.codegen.triton.kernels.products.weight_codes import e4m3_codes, e4m3_values, nearest_integers
from llmc.codegen.triton.kernels.rows.row_block import row_block
from llmc.codegen.triton.machine_code.budget import Budget
from llmc.graph.code_numbers import code_dtype
from llmc.program.launch_arguments import Argument, Count, Rows


@triton.jit
def quantize_tokens_kernel(
    x_ptr: tl.tensor,
    x_row_stride: int,
    x_scale_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    eps: float,
    codes_ptr: tl.tensor,
    codes_row_stride: int,
    scales_ptr: tl.tensor,
    tokens: int,
    COLUMNS: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    SCALES: tl.constexpr,
    BY_ROW: tl.constexpr,
    SLOTS: tl.constexpr,
    NORMED: tl.constexpr,
    BLOCK: tl.constexpr,
    AS_NUMBERS: tl.constexpr,
) -> None:
    """Program t: the codes and the scales of row t. Columns past the last one become zero codes.

    AS_NUMBERS: codes_ptr is for codes times their scales, and no scales are stored.

    tokens: rows in total; x has SLOTS consecutive ones after each x_row_stride. GROUP: columns that share a scale; all
    share one if it is COLUMNS. scales_ptr: [tokens, groups] if BY_ROW, otherwise [groups, tokens], where each row is
    padded to a multiple of SCALES with the last token's scale. NORMED: of row t after an RMS norm with the weight
    norm_ptr.
    """
    place = tl.program_id(0)
    token = tl.minimum(place, tokens - 1).to(tl.int64) if SCALES > 1 else place.to(tl.int64)
    x_ptr += token // SLOTS * x_row_stride + token % SLOTS * COLUMNS
    LARGEST: tl.constexpr = 448.0 if FORMAT == "fp8" else 127.0
    COUNT: tl.constexpr = (COLUMNS + GROUP - 1) // GROUP
    norm = 1.0
    if NORMED:
        squares = tl.zeros([BLOCK], dtype=tl.float32)
        for start in range(0, COLUMNS, BLOCK):
            x = _row(x_ptr, None, 1.0, start + tl.arange(0, BLOCK), COLUMNS, False)
            squares += x * x
        norm = tl.rsqrt(tl.sum(squares, 0) / COLUMNS + eps)
    inverse = 1.0
    if GROUP == COLUMNS:
        largest = tl.zeros([BLOCK], dtype=tl.int32)
        for start in range(0, COLUMNS, BLOCK):
            x = _row(x_ptr, norm_ptr, norm, start + tl.arange(0, BLOCK), COLUMNS, NORMED)
            largest = tl.maximum(largest, tl.abs(x).to(tl.int32, bitcast=True))
        scale, inverse = _scale(tl.max(largest, 0).to(tl.float32, bitcast=True), x_scale_ptr, LARGEST)
        if not AS_NUMBERS:
            tl.store(scales_ptr + token, scale)
    codes_row, end = codes_ptr + token * codes_row_stride, codes_row_stride
    if SCALES > 1:
        end = tl.where(place < tokens, codes_row_stride, 0)
    for start in range(0, COLUMNS, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = _row(x_ptr, norm_ptr, norm, column, COLUMNS, NORMED)
        if GROUP == COLUMNS:
            scaled = x * inverse
        else:
            grouped = x.reshape(BLOCK // GROUP, GROUP)
            largest = tl.max(tl.abs(grouped).to(tl.int32, bitcast=True), axis=1)
            scale, inverses = _scale(largest.to(tl.float32, bitcast=True), x_scale_ptr, LARGEST)
            if not AS_NUMBERS:
                group = start // GROUP + tl.arange(0, BLOCK // GROUP)
                to = token * COUNT + group if BY_ROW else group * (tl.cdiv(tokens, SCALES) * SCALES) + place
                tl.store(scales_ptr + to, scale, mask=group < COUNT)
            scaled = (grouped * inverses[:, None]).reshape(BLOCK)
        scaled = tl.minimum(tl.maximum(scaled, -LARGEST), LARGEST)
        codes = e4m3_codes(scaled) if FORMAT == "fp8" else nearest_integers(scaled)
        if AS_NUMBERS:
            codes = e4m3_values(codes) if FORMAT == "fp8" else codes.to(tl.float32)
            if GROUP == COLUMNS:
                codes *= scale
            else:
                codes = (codes.reshape(BLOCK // GROUP, GROUP) * scale[:, None]).reshape(BLOCK)
        tl.store(codes_row + column, codes.to(codes_ptr.dtype.element_ty), mask=column < end)


@triton.jit
def _scale(magnitude: tl.tensor, x_scale_ptr: tl.tensor, LARGEST: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """The scale of numbers with this largest magnitude, and its inverse."""
    if x_scale_ptr is None:
        scale = tl.div_rn(magnitude, LARGEST)
        # As torch divides a number by a tensor, so that a value between two codes goes where the reference's goes.
        inverse = tl.where(magnitude > 0, tl.div_rn(1.0, tl.where(magnitude > 0, magnitude, 1.0)) * LARGEST, 0.0)
    else:
        static = tl.load(x_scale_ptr)
        scale = tl.where(magnitude != magnitude, magnitude, static)
        inverse = tl.div_rn(1.0, static)
    return scale, inverse


@triton.jit
def _row(
    x_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    norm: tl.tensor,
    column: tl.tensor,
    COLUMNS: tl.constexpr,
    NORMED: tl.constexpr,
) -> tl.tensor:
    """Columns of a row in fp32, 0 past the last one; NORMED: times norm and the norm's weight, rounded to x's dtype."""
    x = tl.load(x_ptr + column, mask=column < COLUMNS, other=0.0).to(tl.float32)
    if NORMED:
        x *= norm
        if norm_ptr is not None:
            x *= tl.load(norm_ptr + column, mask=column < COLUMNS, other=0.0)
        x = x.to(x_ptr.dtype.element_ty).to(tl.float32)
    return x


def quantize_launch(call: Call, *, by_row: bool = False) -> tuple[DeviceLaunch, dict[str, Argument]]:
    """The launch of round_tokens, and what a product then reads in the place of x. It norms x first where that is part
    of the same launch. by_row: whether the scales of a row are neighbours, not those of a group of all rows."""
    norm, format = call.within("x"), call.plain("format")
    x = norm or call
    *several, columns = x.shape("x")
    (slots,) = several or (1,)
    count, groups = _rows_of_slots(x.count("x"), slots), token_groups(call)
    dtype = code_dtype(format)
    codes = rows("codes", call.workspace("x_codes", count, -(-columns // 16) * 16, dtype))
    if groups == 1 or by_row:
        scales = call.workspace("x_scales", count, groups, torch.float32).pointer
    else:
        # A fixed size, since rows are padded to a multiple of a number.
        most = -(-most_rows(call, count) // TILE_SCALES) * TILE_SCALES
        scales = call.workspace("x_scales", 1, groups * most, torch.float32).pointer
    block = min(row_block(columns, most_rows=1).columns, 4096)
    launch = DeviceLaunch(
        quantize_tokens_kernel,
        {
            **rows("x", x.rows("x")),
            "x_scale_ptr": call.vector("scale"),
            "norm_ptr": norm.vector("weight") if norm is not None else None,
            "eps": float(norm.plain("eps")) if norm is not None else 0.0,
            **codes,
            "scales_ptr": scales,
            "tokens": count,
        },
        {
            "COLUMNS": columns,
            "FORMAT": format,
            "GROUP": columns if groups == 1 else call.plain("group"),
            "SCALES": 1,
            "BY_ROW": by_row,
            "SLOTS": slots,
            "NORMED": norm is not None,
            "BLOCK": block,
            "AS_NUMBERS": False,
        },
        (str(count),),
        num_warps=max(1, min(8, block // 256)),
        num_stages=2,
    )
    coded = {"x_ptr": codes["codes_ptr"], "x_row_stride": codes["codes_row_stride"], "x_scales_ptr": scales}
    return launch, coded


def as_numbers(launch: DeviceLaunch, call: Call) -> tuple[DeviceLaunch, dict[str, Argument]]:
    """The launch where it stores the numbers that the codes stand for, and what a product then reads in the place of x.
    call: of round_tokens."""
    columns, count = launch.constants["COLUMNS"], launch.arguments["tokens"]
    assert isinstance(columns, int) and isinstance(count, int | Count | Rows)
    x = call.within("x") or call
    numbers = call.workspace("x_numbers", count, -(-columns // 16) * 16, x.dtype("x"))
    arguments = {**launch.arguments, **rows("codes", numbers), "scales_ptr": None}
    into = {**rows("x", numbers), "x_scales_ptr": None}
    return replace(launch, arguments=arguments, constants={**launch.constants, "AS_NUMBERS": True}), into


def padded_for_tiles(launch: DeviceLaunch) -> DeviceLaunch:
    """The launch with the scales of groups as coded_tile.py reads them."""
    if launch.constants["GROUP"] == launch.constants["COLUMNS"]:
        return launch
    programs = f"cdiv({launch.arguments['tokens']}, {TILE_SCALES}) * {TILE_SCALES}"
    return replace(launch, constants={**launch.constants, "SCALES": TILE_SCALES}, grid=(programs,))


def token_groups(call: Call) -> int:
    """Scales of a token, in a call of round_tokens."""
    group = call.plain("group")
    return 1 if group is None else -(-call.shape("x")[-1] // int(group))


def _rows_of_slots(count: Count | Rows | int, slots: int) -> Count | Rows | int:
    """The number of rows if each of `count` has `slots` of them."""
    if isinstance(count, int):
        return count * slots
    times, of = (count.times, count.count) if isinstance(count, Rows) else (1, count)
    return count if slots == 1 else Rows(times * slots, of)


quantize_tokens_budget = Budget("quantize_tokens_kernel")
