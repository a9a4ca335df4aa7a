"""llmc::select_rows: y[i] = x[rows[i]]; and llmc::embedding of a dense table.

Memory-bound: moves 2·L·C elements. A program copies one block of one row's columns.
"""

import math

import torch
import triton
import triton.language as tl

from llmc.codegen.call import Call
from llmc.codegen.triton.kernel import DeviceLaunch, KernelTemplate, named_arguments, rows
from llmc.codegen.triton.kernels.refusals import takes
from llmc.codegen.triton.kernels.rows.row_block import row_block
from llmc.program import Layout
from llmc.program.launch_arguments import Argument, Count, Rows
from llmc.targets import GpuTarget


@triton.jit
def gather_rows_kernel(
    x_ptr: tl.tensor,
    x_row_stride: int,
    rows_ptr: tl.tensor,
    y_ptr: tl.tensor,
    y_row_stride: int,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Program (i, j) copies the j-th BLOCK columns of row rows[i] of x to row i of y."""
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + i).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < COLUMNS
    values = tl.load(x_ptr + row * x_row_stride + column, mask=inside)
    tl.store(y_ptr + i * y_row_stride + column, values, mask=inside)


def candidates(call: Call, target: GpuTarget) -> tuple[DeviceLaunch, ...]:
    arguments = named_arguments(gather_rows_kernel, call)
    return (gather_launch(arguments, math.prod(call.shape("x")), call.count("rows")),)


def table_lookup(call: Call) -> DeviceLaunch:
    """The launch of an embedding whose table is dense."""
    columns = call.shape("weight")[1]
    arguments = {
        "x_ptr": call.weight("weight", Layout.ROWS),
        "x_row_stride": columns,
        "rows_ptr": call.vector("ids"),
        **rows("y", call.result()),
    }
    return gather_launch(arguments, columns, call.count("ids"))


def gather_launch(arguments: dict[str, Argument], columns: int, count: Count | Rows | int) -> DeviceLaunch:
    """The launch that gathers `count` rows of that many columns."""
    block = min(row_block(columns, most_rows=1).columns, 2048)
    grid = (str(count), str(triton.cdiv(columns, block)))
    return DeviceLaunch(gather_rows_kernel, arguments, {"COLUMNS": columns, "BLOCK": block}, grid)


select_rows = KernelTemplate(torch.ops.llmc.select_rows.default, takes("", typed=("x",)), candidates)
