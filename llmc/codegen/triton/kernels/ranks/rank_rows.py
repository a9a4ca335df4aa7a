"""llmc::rank_rows: y[t] = ids[t] - first if that is a row of this rank's part of a table, and `rows` if not."""

import torch
import triton
import triton.language as tl

from llmc.codegen.call import Call
from llmc.codegen.triton.kernel import DeviceLaunch, KernelTemplate, named_arguments
from llmc.codegen.triton.kernels.refusals import takes
from llmc.targets import GpuTarget

_BLOCK = 256


@triton.jit
def rank_rows_kernel(
    ids_ptr: tl.tensor,
    first_ptr: tl.tensor,
    y_ptr: tl.tensor,
    y_row_stride: int,
    tokens: int,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """BLOCK tokens a program."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < tokens
    own = tl.load(ids_ptr + token, mask=inside, other=0) - tl.load(first_ptr)
    tl.store(y_ptr + token * y_row_stride, tl.where((own >= 0) & (own < ROWS), own, ROWS), mask=inside)


def candidates(call: Call, target: GpuTarget) -> tuple[DeviceLaunch, ...]:
    count = call.count("ids")
    arguments = named_arguments(rank_rows_kernel, call, tokens=count)
    constants = {"ROWS": call.plain("rows"), "BLOCK": _BLOCK}
    return (DeviceLaunch(rank_rows_kernel, arguments, constants, (f"cdiv({count}, {_BLOCK})",)),)


rank_rows = KernelTemplate(torch.ops.llmc.rank_rows.default, takes("ids[tokens |]", typed=()), candidates)
