"""llmc::rope_angles: cos and sin of positions[t]·inv_freq[i], times scale.

Arithmetic on special functions, T·rotary of them; writes 8 bytes for each pair. Computed once a step, for all layers.
"""

import torch
import triton
import triton.language as tl
from torch import fx

from llmc.codegen.call import Call
from llmc.codegen.triton.kernel import DeviceLaunch, KernelTemplate, rows
from llmc.codegen.triton.kernels.refusals import refuse_ranks
from llmc.graph.refusal import Refusal
from llmc.targets import GpuTarget


@triton.jit
def rope_angles_kernel(
    positions_ptr: tl.tensor,
    inv_freq_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    cos_row_stride: int,
    sin_ptr: tl.tensor,
    sin_row_stride: int,
    scale: float,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Program t computes token t's HALF angles in fp32, as the reference does."""
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, BLOCK)
    inside = pair < HALF
    position = tl.load(positions_ptr + token).to(tl.float32)
    angle = position * tl.load(inv_freq_ptr + pair, mask=inside, other=0.0)
    tl.store(cos_ptr + token * cos_row_stride + pair, tl.cos(angle) * scale, mask=inside)
    tl.store(sin_ptr + token * sin_row_stride + pair, tl.sin(angle) * scale, mask=inside)


def supports(node: fx.Node, target: GpuTarget) -> Refusal | None:
    """One position a token."""
    return refuse_ranks(node, positions=(1,), inv_freq=(1,))


def candidates(call: Call, target: GpuTarget) -> tuple[DeviceLaunch, ...]:
    (half,) = call.shape("inv_freq")
    arguments = {
        "positions_ptr": call.vector("positions"),
        "inv_freq_ptr": call.vector("inv_freq"),
        **rows("cos", call.result(0)),
        **rows("sin", call.result(1)),
        "scale": call.plain("scale"),
    }
    constants = {"HALF": half, "BLOCK": triton.next_power_of_2(half)}
    return (DeviceLaunch(rope_angles_kernel, arguments, constants, (str(call.count("positions")),), num_warps=1),)


rope_angles = KernelTemplate(torch.ops.llmc.rope_angles.default, supports, candidates)
