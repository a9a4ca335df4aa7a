"""llmc::select_channels: y[t, c] = x[t, order[c]].

Memory-bound: moves 2·T·C elements. A program computes one block of one row's columns.
"""

import torch
import triton
import triton.language as tl

from llmc.codegen.call import Call
from llmc.codegen.triton.kernel import DeviceLaunch, KernelTemplate, named_arguments
from llmc.codegen.triton.kernels.refusals import takes
from llmc.codegen.triton.kernels.rows.row_block import row_block
from llmc.targets import GpuTarget


@triton.jit
def select_channels_kernel(
    x_ptr: tl.tensor,
    x_row_stride: int,
    order_ptr: tl.tensor,
    y_ptr: tl.tensor,
    y_row_stride: int,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Program (t, j): the j-th BLOCK columns of y's row t."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < COLUMNS
    order = tl.load(order_ptr + column, mask=inside, other=0)
    values = tl.load(x_ptr + token * x_row_stride + order, mask=inside)
    tl.store(y_ptr + token * y_row_stride + column, values, mask=inside)


def candidates(call: Call, target: GpuTarget) -> tuple[DeviceLaunch, ...]:
    (columns,) = call.shape("order")
    block = min(row_block(columns, most_rows=1).columns, 1024)
    arguments = named_arguments(select_channels_kernel, call)
    grid = (str(call.count("x")), str(triton.cdiv(columns, block)))
    return (DeviceLaunch(select_channels_kernel, arguments, {"COLUMNS": columns, "BLOCK": block}, grid),)


select_channels = KernelTemplate(
    torch.ops.llmc.select_channels.default, takes("x[rows | channels] order[channels]"), candidates
)
