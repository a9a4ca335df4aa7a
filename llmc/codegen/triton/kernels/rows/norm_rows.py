"""What the norms share: which rows they take, the sum that they norm, how rows are stored, and the launch."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import fx

from llmc.codegen.call import Call
from llmc.codegen.triton.kernel import DeviceLaunch, rows
from llmc.codegen.triton.kernels.refusals import refuse_dtypes, refuse_ranks
from llmc.codegen.triton.kernels.rows.row_block import row_block
from llmc.graph.refusal import Refusal
from llmc.program.launch_arguments import Argument, Operand
from llmc.targets import GpuTarget


@triton.jit
def summand(
    x_ptr: tl.tensor,
    x_row: tl.tensor,
    residual_ptr: tl.tensor,
    residual_row: tl.tensor,
    channel: tl.tensor,
    inside: tl.tensor,
) -> tl.tensor:
    """x, or x + residual rounded to x's dtype as the next layer will read it; in fp32, 0 outside."""
    s = tl.load(x_ptr + x_row[:, None] + channel[None, :], mask=inside, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        s += tl.load(residual_ptr + residual_row[:, None] + channel[None, :], mask=inside, other=0.0).to(tl.float32)
        s = s.to(x_ptr.dtype.element_ty).to(tl.float32)
    return s


@triton.jit
def store_rows(
    y: tl.tensor,
    s: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    y_ptr: tl.tensor,
    y_row: tl.tensor,
    sum_ptr: tl.tensor,
    sum_row: tl.tensor,
    channel: tl.tensor,
    inside: tl.tensor,
    CHANNELS: tl.constexpr,
) -> None:
    """y·weight + bias and, where it is wanted, the sum s that y is the norm of; each rounded once."""
    if weight_ptr is not None:
        y *= tl.load(weight_ptr + channel, mask=channel < CHANNELS, other=0.0)[None, :]
    if bias_ptr is not None:
        y += tl.load(bias_ptr + channel, mask=channel < CHANNELS, other=0.0)[None, :]
    tl.store(y_ptr + y_row[:, None] + channel[None, :], y.to(y_ptr.dtype.element_ty), mask=inside)
    if sum_ptr is not None:
        tl.store(sum_ptr + sum_row[:, None] + channel[None, :], s.to(sum_ptr.dtype.element_ty), mask=inside)


def norm_launch(
    function: Any,
    call: Call,
    vectors: dict[str, Argument],
    into: Operand,
    residual: Operand | None,
    total: Operand | None,
) -> DeviceLaunch:
    """One launch for the node's x. vectors: the kernel's weight and bias. into, residual, total: rows."""
    *groups, channels = call.shape("x")
    count, block = groups[0] if groups else 1, row_block(channels)
    return DeviceLaunch(
        function,
        {
            **rows("x", call.rows("x")),
            **rows("residual", residual),
            **vectors,
            **rows("y", into),
            **rows("sum", total),
            "tokens": call.count("x"),
            "eps": call.plain("eps"),
        },
        {"GROUPS": count, "CHANNELS": channels, "ROWS": block.rows, "BLOCK": block.columns},
        (f"cdiv({call.count('x')} * {count}, {block.rows})",),
        num_warps=block.num_warps,
    )


def supports(node: fx.Node, target: GpuTarget) -> Refusal | None:
    """x and residual of a float dtype that they share, of rank 2 or 3."""
    return refuse_dtypes(node, "x", "residual") or refuse_ranks(node, x=(2, 3))
