"""Norms of rows, with the residual sum before them: y = (s - mean) / sqrt(variance + eps) · weight + bias.

s = x (+ residual); of an RMS norm, which is not CENTRED, the mean is 0. Memory-bound: moves 2·T·C elements, with the
residual 4·T·C (x and residual in, y and the sum out). A program owns whole rows (a row is one token's one group, such
as a head), so that nothing is exchanged between programs; a row that is longer than a block is read again for each
sum, from the L2 cache: the variance is that of the centred row, since the difference of two large sums would lose its
digits.
"""

import triton
import triton.language as tl

from llmc.codegen.call import Call
from llmc.codegen.triton.kernel import DeviceLaunch, named_arguments, rows
from llmc.codegen.triton.kernels.agreed_sums import sum_of_products
from llmc.codegen.triton.kernels.rows.row_block import row_block
from llmc.codegen.triton.machine_code.budget import Budget
from llmc.program.launch_arguments import Argument, Operand


@triton.jit
def norm_kernel(
    x_ptr: tl.tensor,
    x_row_stride: int,
    residual_ptr: tl.tensor,
    residual_row_stride: int,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    y_ptr: tl.tensor,
    y_row_stride: int,
    sum_ptr: tl.tensor,
    sum_row_stride: int,
    tokens: int,
    eps: float,
    CENTRED: tl.constexpr,
    GROUPS: tl.constexpr,
    CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """ROWS rows of CHANNELS a program. All arithmetic is fp32, rounded once at the store."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token, group = row // GROUPS, row % GROUPS
    x_row = token * x_row_stride + group * CHANNELS
    residual_row = token * residual_row_stride + group * CHANNELS
    y_row = token * y_row_stride + group * CHANNELS
    sum_row = token * sum_row_stride + group * CHANNELS
    is_row = (token < tokens)[:, None]
    mean = tl.zeros([ROWS], dtype=tl.float32)
    if BLOCK >= CHANNELS:
        channel = tl.arange(0, BLOCK)
        inside = is_row & (channel < CHANNELS)[None, :]
        s = summand(x_ptr, x_row, residual_ptr, residual_row, channel, inside)
        if CENTRED:
            mean = tl.sum(s, axis=1) / CHANNELS
        y = centred(s, mean, inside, CENTRED)
        scale = tl.rsqrt(sum_of_products(y, y, 1) / CHANNELS + eps)
        y *= scale[:, None]
        store_rows(y, s, weight_ptr, bias_ptr, y_ptr, y_row, sum_ptr, sum_row, channel, inside, CHANNELS)
    else:
        if CENTRED:
            total = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
            for start in range(0, CHANNELS, BLOCK):
                channel = start + tl.arange(0, BLOCK)
                inside = is_row & (channel < CHANNELS)[None, :]
                total += summand(x_ptr, x_row, residual_ptr, residual_row, channel, inside)
            mean = tl.sum(total, axis=1) / CHANNELS
        squares = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
        for start in range(0, CHANNELS, BLOCK):
            channel = start + tl.arange(0, BLOCK)
            inside = is_row & (channel < CHANNELS)[None, :]
            y = centred(summand(x_ptr, x_row, residual_ptr, residual_row, channel, inside), mean, inside, CENTRED)
            squares += y * y
        scale = tl.rsqrt(tl.sum(squares, axis=1) / CHANNELS + eps)
        for start in range(0, CHANNELS, BLOCK):
            channel = start + tl.arange(0, BLOCK)
            inside = is_row & (channel < CHANNELS)[None, :]
            s = summand(x_ptr, x_row, residual_ptr, residual_row, channel, inside)
            y = centred(s, mean, inside, CENTRED) * scale[:, None]
            store_rows(y, s, weight_ptr, bias_ptr, y_ptr, y_row, sum_ptr, sum_row, channel, inside, CHANNELS)


@triton.jit
def centred(s: tl.tensor, mean: tl.tensor, inside: tl.tensor, CENTRED: tl.constexpr) -> tl.tensor:
    """s - mean, 0 outside; or s itself."""
    if CENTRED:
        return tl.where(inside, s - mean[:, None], 0.0)
    else:
        return s


@triton.jit
def summand(
    x_ptr: tl.tensor,
    x_row: tl.tensor,
    residual_ptr: tl.tensor,
    residual_row: tl.tensor,
    channel: tl.tensor,
    inside: tl.tensor,
) -> tl.tensor:
    """x, or x + residual rounded to x's dtype as the next layer will read it; in fp32, 0 outside."""
    s = tl.load(x_ptr + x_row[:, None] + channel[None, :], mask=inside, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        s += tl.load(residual_ptr + residual_row[:, None] + channel[None, :], mask=inside, other=0.0).to(tl.float32)
        s = s.to(x_ptr.dtype.element_ty).to(tl.float32)
    return s


@triton.jit
def store_rows(
    y: tl.tensor,
    s: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    y_ptr: tl.tensor,
    y_row: tl.tensor,
    sum_ptr: tl.tensor,
    sum_row: tl.tensor,
    channel: tl.tensor,
    inside: tl.tensor,
    CHANNELS: tl.constexpr,
) -> None:
    """y·weight + bias and, where it is wanted, the sum s that y is the norm of; each rounded once."""
    if weight_ptr is not None:
        y *= tl.load(weight_ptr + channel, mask=channel < CHANNELS, other=0.0)[None, :]
    if bias_ptr is not None:
        y += tl.load(bias_ptr + channel, mask=channel < CHANNELS, other=0.0)[None, :]
    tl.store(y_ptr + y_row[:, None] + channel[None, :], y.to(y_ptr.dtype.element_ty), mask=inside)
    if sum_ptr is not None:
        tl.store(sum_ptr + sum_row[:, None] + channel[None, :], s.to(sum_ptr.dtype.element_ty), mask=inside)


def norm_launch(call: Call, into: Operand, *, centred: bool = False) -> DeviceLaunch:
    """Return the launch that norms the node's x or residual sum. into: rows. centred: a layer norm, with a bias."""
    absent: dict[str, Argument] = {} if centred else {"bias_ptr": None}
    if "residual" not in call.names():
        absent |= {**rows("residual", None), **rows("sum", None)}
    given = {**rows("y", into), "tokens": call.count("x"), "eps": call.plain("eps")}
    *groups, channels = call.shape("x")
    count, block = groups[0] if groups else 1, row_block(channels)
    return DeviceLaunch(
        norm_kernel,
        named_arguments(norm_kernel, call, ("y", "sum"), **given, **absent),
        {"CENTRED": centred, "GROUPS": count, "CHANNELS": channels, "ROWS": block.rows, "BLOCK": block.columns},
        (f"cdiv({call.count('x')} * {count}, {block.rows})",),
        num_warps=block.num_warps,
    )


norm_budget = Budget("norm_kernel")
