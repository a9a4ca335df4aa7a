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
from llmc.codegen.triton.kernel import DeviceLaunch, KernelTemplate
from llmc.codegen.triton.kernels.rows.norm_rows import norm_launch, store_rows, summand, supports
from llmc.program.launch_arguments import Argument, Operand
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
        y = s * scale[:, None]
        store_rows(y, s, weight_ptr, None, y_ptr, y_row, sum_ptr, sum_row, channel, inside, CHANNELS)
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
            y = s * scale[:, None]
            store_rows(y, s, weight_ptr, None, y_ptr, y_row, sum_ptr, sum_row, channel, inside, CHANNELS)


def candidates(call: Call, target: GpuTarget) -> tuple[DeviceLaunch, ...]:
    """rms_norm: one launch."""
    return (norm_into(call, call.result()),)


def candidates_with_sum(call: Call, target: GpuTarget) -> tuple[DeviceLaunch, ...]:
    """add_rms_norm: one launch, which writes the sum too."""
    vectors: dict[str, Argument] = {"weight_ptr": call.vector("weight")}
    return (norm_launch(rms_norm_kernel, call, vectors, call.result(), call.rows("residual"), call.result(1)),)


def norm_into(call: Call, into: Operand) -> DeviceLaunch:
    """The launch of a rms_norm. into: rows, such as of a workspace."""
    return norm_launch(rms_norm_kernel, call, {"weight_ptr": call.vector("weight")}, into, None, None)


rms_norm = KernelTemplate(torch.ops.llmc.rms_norm.default, supports, candidates)
add_rms_norm = KernelTemplate(torch.ops.llmc.add_rms_norm.default, supports, candidates_with_sum)
