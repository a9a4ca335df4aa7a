"""llmc::sum_experts: y[t] = Σ_s weights[t, s]·x[t, s], in fp32 and in the order of slots.

Memory-bound: moves (slots + 1)·T·C elements. A program computes one block of one token's columns.
"""

import torch
import triton
import triton.language as tl
from torch import fx

from llmc.codegen.call import Call
from llmc.codegen.triton.kernel import DeviceLaunch, KernelTemplate, named_arguments
from llmc.codegen.triton.kernels.refusals import refuse_dtypes, refuse_ranks
from llmc.graph.refusal import Refusal
from llmc.targets import GpuTarget

_MOST_COLUMNS = 1024


@triton.jit
def sum_experts_kernel(
    x_ptr: tl.tensor,
    x_row_stride: int,
    weights_ptr: tl.tensor,
    weights_row_stride: int,
    y_ptr: tl.tensor,
    y_row_stride: int,
    SLOTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Program (t, j): the j-th BLOCK columns of token t."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < COLUMNS
    sums = tl.zeros([BLOCK], dtype=tl.float32)
    for slot in range(SLOTS):
        weight = tl.load(weights_ptr + token * weights_row_stride + slot).to(tl.float32)
        x = tl.load(x_ptr + token * x_row_stride + slot * COLUMNS + column, mask=inside, other=0.0)
        sums += x.to(tl.float32) * weight
    tl.store(y_ptr + token * y_row_stride + column, sums.to(y_ptr.dtype.element_ty), mask=inside)


def supports(node: fx.Node, target: GpuTarget) -> Refusal | None:
    """x: [tokens, slots, channels], weights: [tokens, slots], each of a float dtype."""
    return refuse_dtypes(node, "x") or refuse_dtypes(node, "weights") or refuse_ranks(node, x=(3,), weights=(2,))


def candidates(call: Call, target: GpuTarget) -> tuple[DeviceLaunch, ...]:
    slots, columns = call.shape("x")
    block = min(triton.next_power_of_2(columns), _MOST_COLUMNS)
    constants = {"SLOTS": slots, "COLUMNS": columns, "BLOCK": block}
    grid = (str(call.count("x")), str(triton.cdiv(columns, block)))
    return (DeviceLaunch(sum_experts_kernel, named_arguments(sum_experts_kernel, call), constants, grid),)


sum_experts = KernelTemplate(torch.ops.llmc.sum_experts.default, supports, candidates)
