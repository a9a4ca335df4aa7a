"""llmc::pool_rows: y[i] = the mean of x from the first token of rows[i]'s text to rows[i], or the first token's row.

Memory-bound: moves T·C elements for a mean. A program sums up a block of one text's columns, in the order of tokens: a
text's sum has the same bits in any company.
"""

import torch
import triton
import triton.language as tl

from llmc.codegen.call import Call
from llmc.codegen.triton.kernel import DeviceLaunch, KernelTemplate, named_arguments
from llmc.codegen.triton.kernels.refusals import takes
from llmc.program.launch_arguments import Count
from llmc.targets import GpuTarget

_MOST_COLUMNS = 128


@triton.jit
def pool_rows_kernel(
    x_ptr: tl.tensor,
    x_row_stride: int,
    query_starts_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    y_ptr: tl.tensor,
    y_row_stride: int,
    requests: int,
    COLUMNS: tl.constexpr,
    IS_MEAN: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Program (i, j): the j-th BLOCK columns of wanted row i."""
    i = tl.program_id(0).to(tl.int64)
    last = tl.load(rows_ptr + i)
    first = _first_token(query_starts_ptr, last, requests)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < COLUMNS
    end = last + 1 if IS_MEAN else first + 1
    sums = tl.zeros([BLOCK], tl.float32)
    row = first.to(tl.int64)
    for _ in tl.range(first, end, num_stages=4):
        sums += tl.load(x_ptr + row * x_row_stride + column, mask=inside, other=0.0).to(tl.float32)
        row += 1
    y = sums / (end - first).to(tl.float32)
    tl.store(y_ptr + i * y_row_stride + column, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _first_token(query_starts_ptr: tl.tensor, token: tl.tensor, requests: int) -> tl.tensor:
    """The first token of the text that contains `token`."""
    low = token * 0
    high = low + requests
    while low + 1 < high:
        middle = (low + high) // 2
        is_before = tl.load(query_starts_ptr + middle) <= token
        low = tl.where(is_before, middle, low)
        high = tl.where(is_before, high, middle)
    return tl.load(query_starts_ptr + low)


def candidates(call: Call, target: GpuTarget) -> tuple[DeviceLaunch, ...]:
    """Return the single way: one launch."""
    (columns,) = call.shape("x")
    block = min(triton.next_power_of_2(columns), _MOST_COLUMNS)
    arguments = named_arguments(pool_rows_kernel, call, requests=Count.REQUESTS)
    constants = {"COLUMNS": columns, "IS_MEAN": call.plain("pooling") == "mean", "BLOCK": block}
    grid = (str(call.count("rows")), str(triton.cdiv(columns, block)))
    return (DeviceLaunch(pool_rows_kernel, arguments, constants, grid),)


pool_rows = KernelTemplate(torch.ops.llmc.pool_rows.default, takes("x[tokens | channels]"), candidates)
