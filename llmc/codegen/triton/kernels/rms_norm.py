"""llmc::rms_norm and llmc::add_rms_norm: y[c] = s[c] / sqrt(mean_c(s[c]²) + eps) · weight[c], s = x (+ residual).

Memory-bound: moves 2·T·C elements, with the residual 4·T·C (x and residual in, y and the sum out). A program owns whole
rows (a row is one token's one group, such as a head), so that nothing is exchanged between programs; a row that is
longer than a block is read twice, the second time from the L2 cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from llmc.codegen.call import Call
from llmc.codegen.triton.kernel import DeviceLaunch, KernelTemplate, rows
from llmc.codegen.triton.kernels.norm_rows import summand, supports
from llmc.codegen.triton.kernels.row_tile import row_tile
from llmc.targets import GpuTarget


@triton.jit
def rms_norm_kernel(
    x_ptr: tl.tensor,
    x_row_stride: int,
    residual_ptr: tl.tensor,
    residual_row_stride: int,
    weight_ptr: tl.tensor,
    y_ptr: tl.tensor,
    y_row_stride: int,
    sum_ptr: tl.tensor,
    sum_row_stride: int,
    tokens: int,
    eps: float,
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
    if BLOCK >= CHANNELS:
        channel = tl.arange(0, BLOCK)
        inside = is_row & (channel < CHANNELS)[None, :]
        s = summand(x_ptr, x_row, residual_ptr, residual_row, channel, inside)
        scale = tl.rsqrt(tl.sum(s * s, axis=1) / CHANNELS + eps)
        _store(s, scale, weight_ptr, y_ptr, y_row, sum_ptr, sum_row, channel, inside, CHANNELS)
    else:
        squares = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
        for start in range(0, CHANNELS, BLOCK):
            channel = start + tl.arange(0, BLOCK)
            inside = is_row & (channel < CHANNELS)[None, :]
            s = summand(x_ptr, x_row, residual_ptr, residual_row, channel, inside)
            squares += s * s
        scale = tl.rsqrt(tl.sum(squares, axis=1) / CHANNELS + eps)
        for start in range(0, CHANNELS, BLOCK):
            channel = start + tl.arange(0, BLOCK)
            inside = is_row & (channel < CHANNELS)[None, :]
            s = summand(x_ptr, x_row, residual_ptr, residual_row, channel, inside)
            _store(s, scale, weight_ptr, y_ptr, y_row, sum_ptr, sum_row, channel, inside, CHANNELS)


@triton.jit
def _store(
    s: tl.tensor,
    scale: tl.tensor,
    weight_ptr: tl.tensor,
    y_ptr: tl.tensor,
    y_row: tl.tensor,
    sum_ptr: tl.tensor,
    sum_row: tl.tensor,
    channel: tl.tensor,
    inside: tl.tensor,
    CHANNELS: tl.constexpr,
) -> None:
    y = s * scale[:, None]
    if weight_ptr is not None:
        y *= tl.load(weight_ptr + channel, mask=channel < CHANNELS, other=0.0)[None, :]
    tl.store(y_ptr + y_row[:, None] + channel[None, :], y.to(y_ptr.dtype.element_ty), mask=inside)
    if sum_ptr is not None:
        tl.store(sum_ptr + sum_row[:, None] + channel[None, :], s.to(sum_ptr.dtype.element_ty), mask=inside)


def candidates(call: Call, target: GpuTarget) -> tuple[DeviceLaunch, ...]:
    """rms_norm: one launch."""
    return (_launch(call, call.vector("weight"), None, call.result(), None),)


def candidates_with_sum(call: Call, target: GpuTarget) -> tuple[DeviceLaunch, ...]:
    """add_rms_norm: one launch, which writes the sum too."""
    return (_launch(call, call.vector("weight"), call.rows("residual"), call.result(), call.result(1)),)


def norm_launch(call: Call, weight: str | None, into: str) -> DeviceLaunch:
    """The norm of another op's x, before its own launch. into: rows of a workspace."""
    return _launch(call, weight, None, into, None)


def _launch(call: Call, weight: str | None, residual: str | None, result: str, total: str | None) -> DeviceLaunch:
    *groups, channels = call.shape("x")
    count, tile = groups[0] if groups else 1, row_tile(channels)
    return DeviceLaunch(
        rms_norm_kernel,
        {
            **rows("x", call.rows("x")),
            **rows("residual", residual),
            "weight_ptr": weight,
            **rows("y", result),
            **rows("sum", total),
            "tokens": call.count("x"),
            "eps": call.plain("eps"),
        },
        {"GROUPS": count, "CHANNELS": channels, "ROWS": tile.rows, "BLOCK": tile.block},
        (f"cdiv({call.count('x')} * {count}, {tile.rows})",),
        num_warps=tile.num_warps,
    )


rms_norm = KernelTemplate(torch.ops.llmc.rms_norm.default, supports, candidates)
add_rms_norm = KernelTemplate(torch.ops.llmc.add_rms_norm.default, supports, candidates_with_sum)
