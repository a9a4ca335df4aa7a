"""llmc::layer_scale: y[t, c] = x[t, c] · weight[c]. Memory-bound: moves 2·T·C elements; a program has a row's block."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from llmc.codegen.call import Call
from llmc.codegen.triton.kernel import DeviceLaunch, KernelTemplate, named_arguments
from llmc.codegen.triton.kernels.refusals import takes
from llmc.codegen.triton.kernels.rows.row_block import row_block
from llmc.targets import GpuTarget


@triton.jit
def layer_scale_kernel(
    x_ptr: tl.tensor,
    x_row_stride: int,
    weight_ptr: tl.tensor,
    y_ptr: tl.tensor,
    y_row_stride: int,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Program (t, j): the j-th BLOCK channels of row t."""
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    x = tl.load(x_ptr + token * x_row_stride + channel, mask=inside, other=0.0).to(tl.float32)
    y = x * tl.load(weight_ptr + channel, mask=inside, other=0.0)
    tl.store(y_ptr + token * y_row_stride + channel, y.to(y_ptr.dtype.element_ty), mask=inside)


def candidates(call: Call, target: GpuTarget) -> tuple[DeviceLaunch, ...]:
    """One launch."""
    (channels,) = call.shape("weight")
    block = min(row_block(channels, most_rows=1).columns, 1024)
    arguments, constants = named_arguments(layer_scale_kernel, call), {"CHANNELS": channels, "BLOCK": block}
    grid = (str(call.count("x")), str(triton.cdiv(channels, block)))
    return (DeviceLaunch(layer_scale_kernel, arguments, constants, grid),)


layer_scale = KernelTemplate(
    torch.ops.llmc.layer_scale.default, takes("x[tokens | channels] weight[channels]"), candidates
)
