"""What the norms share: which rows they take, and the sum that they norm."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import fx

from llmc.codegen.triton.kernels.refusals import refuse_dtypes, refuse_ranks
from llmc.graph.refusal import Refusal
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


def supports(node: fx.Node, target: GpuTarget) -> Refusal | None:
    """x and residual of a float dtype that they share, of rank 2 or 3."""
    return refuse_dtypes(node, "x", "residual") or refuse_ranks(node, x=(2, 3))
