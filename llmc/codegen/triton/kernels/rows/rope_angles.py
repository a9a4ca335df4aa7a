"""llmc::rope_angles: cos and sin of positions[t]·inv_freq[i], times scale.

Bound by T·rotary special functions; writes 8 bytes for each pair. Computed once per step, for all layers.
"""

import torch
import triton
import triton.language as tl

from llmc.codegen.call import Call
from llmc.codegen.triton.kernel import DeviceLaunch, KernelTemplate, named_arguments
from llmc.codegen.triton.kernels.refusals import takes
from llmc.codegen.triton.machine_code.budget import Budget
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
) -> None:
    """Program t computes token t's HALF angles in fp32, as the reference does."""
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, triton.next_power_of_2(HALF))
    inside = pair < HALF
    position = tl.load(positions_ptr + token).to(tl.float32)
    angle = position * tl.load(inv_freq_ptr + pair, mask=inside, other=0.0)
    tl.store(cos_ptr + token * cos_row_stride + pair, tl.cos(angle) * scale, mask=inside)
    tl.store(sin_ptr + token * sin_row_stride + pair, tl.sin(angle) * scale, mask=inside)


def candidates(call: Call, target: GpuTarget) -> tuple[DeviceLaunch, ...]:
    (half,) = call.shape("inv_freq")
    arguments = named_arguments(rope_angles_kernel, call, ("cos", "sin"), scale=call.plain("scale"))
    return (DeviceLaunch(rope_angles_kernel, arguments, {"HALF": half}, (str(call.count("positions")),), num_warps=1),)


rope_angles = KernelTemplate(
    torch.ops.llmc.rope_angles.default, takes("positions[tokens |] inv_freq[half]", typed=()), candidates
)

rope_angles_budget = Budget("rope_angles_kernel")
