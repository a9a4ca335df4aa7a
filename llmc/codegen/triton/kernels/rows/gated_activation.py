"""llmc::gated_activation: y = activation(gate)·up.

Memory-bound: moves 3·T·C elements. A program computes one block of one row's columns.
"""

import math

import torch
import triton
import triton.language as tl

from llmc.codegen.call import Call
from llmc.codegen.triton.kernel import DeviceLaunch, KernelTemplate, named_arguments
from llmc.codegen.triton.kernels.activation import activate
from llmc.codegen.triton.kernels.refusals import takes
from llmc.codegen.triton.kernels.rows.row_block import row_block
from llmc.targets import GpuTarget


@triton.jit
def gated_activation_kernel(
    gate_ptr: tl.tensor,
    gate_row_stride: int,
    up_ptr: tl.tensor,
    up_row_stride: int,
    y_ptr: tl.tensor,
    y_row_stride: int,
    COLUMNS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Program (t, j) computes the j-th BLOCK columns of token t in fp32, rounded once at the store."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < COLUMNS
    gate = tl.load(gate_ptr + token * gate_row_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + token * up_row_stride + column, mask=inside, other=0.0).to(tl.float32)
    y = activate(gate, ACTIVATION) * up
    tl.store(y_ptr + token * y_row_stride + column, y.to(y_ptr.dtype.element_ty), mask=inside)


def candidates(call: Call, target: GpuTarget) -> tuple[DeviceLaunch, ...]:
    columns = math.prod(call.shape("gate"))
    block = min(row_block(columns).columns, 1024)
    arguments = named_arguments(gated_activation_kernel, call)
    constants = {"COLUMNS": columns, "ACTIVATION": call.plain("activation"), "BLOCK": block}
    grid = (str(call.count("gate")), str(triton.cdiv(columns, block)))
    return (DeviceLaunch(gated_activation_kernel, arguments, constants, grid),)


gated_activation = KernelTemplate(
    torch.ops.llmc.gated_activation.default,
    takes("", typed=("gate", "up")),
    candidates,
    in_place=(("gate", 0), ("up", 0)),
)
