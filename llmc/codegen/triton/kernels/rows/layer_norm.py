"""llmc::layer_norm and llmc::add_layer_norm: y = (s - mean) / sqrt(variance + eps) · weight + bias, s = x (+ residual).

Memory-bound: moves 2·T·C elements, with the residual 4·T·C (x and residual in, y and the sum out). A program owns whole
rows (a row is one token's one group, such as a head), so that nothing is exchanged between programs; a row that is
longer than a block is read three times, the second and third from the L2 cache: the variance is that of the centred
row, since the difference of two large sums would lose its digits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from llmc.codegen.call import Call
from llmc.codegen.triton.kernel import DeviceLaunch, KernelTemplate
from llmc.codegen.triton.kernels.rows.norm_rows import norm_launch, store_rows, summand, supports
from llmc.program.launch_arguments import Argument
from llmc.targets import GpuTarget


@triton.jit
def layer_norm_kernel(
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
    GROUPS: tl.constexpr,
    CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """ROWS rows of CHANNELS a program. Mean, variance and products are fp32, rounded once at the store."""
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
        mean = tl.sum(s, axis=1) / CHANNELS
        centred = tl.where(inside, s - mean[:, None], 0.0)
        scale = tl.rsqrt(tl.sum(centred * centred, axis=1) / CHANNELS + eps)
        y = (s - mean[:, None]) * scale[:, None]
        store_rows(y, s, weight_ptr, bias_ptr, y_ptr, y_row, sum_ptr, sum_row, channel, inside, CHANNELS)
    else:
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
            s = summand(x_ptr, x_row, residual_ptr, residual_row, channel, inside)
            centred = tl.where(inside, s - mean[:, None], 0.0)
            squares += centred * centred
        scale = tl.rsqrt(tl.sum(squares, axis=1) / CHANNELS + eps)
        for start in range(0, CHANNELS, BLOCK):
            channel = start + tl.arange(0, BLOCK)
            inside = is_row & (channel < CHANNELS)[None, :]
            s = summand(x_ptr, x_row, residual_ptr, residual_row, channel, inside)
            y = (s - mean[:, None]) * scale[:, None]
            store_rows(y, s, weight_ptr, bias_ptr, y_ptr, y_row, sum_ptr, sum_row, channel, inside, CHANNELS)


def candidates(call: Call, target: GpuTarget) -> tuple[DeviceLaunch, ...]:
    """layer_norm: one launch."""
    return (norm_launch(layer_norm_kernel, call, _vectors(call), call.result(), None, None),)


def candidates_with_sum(call: Call, target: GpuTarget) -> tuple[DeviceLaunch, ...]:
    """add_layer_norm: one launch, which writes the sum too."""
    residual, total = call.rows("residual"), call.result(1)
    return (norm_launch(layer_norm_kernel, call, _vectors(call), call.result(), residual, total),)


def _vectors(call: Call) -> dict[str, Argument]:
    return {"weight_ptr": call.vector("weight"), "bias_ptr": call.vector("bias")}


layer_norm = KernelTemplate(torch.ops.llmc.layer_norm.default, supports, candidates)
add_layer_norm = KernelTemplate(torch.ops.llmc.add_layer_norm.default, supports, candidates_with_sum)
