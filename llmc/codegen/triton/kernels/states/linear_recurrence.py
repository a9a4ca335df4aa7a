"""llmc::linear_recurrence_with_state: y[t, c] = S[c], then S[c] ← decay[t, c]·S[c] + x[t, c], or, tropical,
S[c] ← max(decay[t, c] + S[c], x[t, c]).

A program takes a block of channels of one request through its tokens, the state in registers; the next tokens are on
their way meanwhile. Moves 12·T·C + 8·R·C bytes.
"""

import torch
import triton
import triton.language as tl

from llmc.codegen.call import Call
from llmc.codegen.triton.kernel import DeviceLaunch, KernelTemplate, named_arguments
from llmc.codegen.triton.kernels.refusals import takes
from llmc.codegen.triton.kernels.states.carried import carried
from llmc.program.launch_arguments import Count
from llmc.targets import GpuTarget

_MOST_CHANNELS = 64


@triton.jit
def linear_recurrence_kernel(
    x_ptr: tl.tensor,
    x_row_stride: int,
    decay_ptr: tl.tensor,
    decay_row_stride: int,
    y_ptr: tl.tensor,
    y_row_stride: int,
    initial: float,
    state_ptr: tl.tensor,
    query_starts_ptr: tl.tensor,
    context_lens_ptr: tl.tensor,
    state_slots_ptr: tl.tensor,
    CHANNELS: tl.constexpr,
    TROPICAL: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Program (j, r): the j-th BLOCK channels of request r."""
    first, end, slot, earlier = carried(tl.program_id(1), query_starts_ptr, context_lens_ptr, state_slots_ptr)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    state_ptrs = state_ptr + slot * CHANNELS + channel
    state = tl.load(state_ptrs, mask=channel < tl.where(earlier > 0, CHANNELS, 0), other=initial)
    row = first.to(tl.int64)
    for _ in tl.range(first, end, num_stages=4):
        x = tl.load(x_ptr + row * x_row_stride + channel, mask=inside, other=0.0)
        decay = tl.load(decay_ptr + row * decay_row_stride + channel, mask=inside, other=0.0)
        tl.store(y_ptr + row * y_row_stride + channel, state, mask=inside)
        larger = tl.maximum(decay + state, x, propagate_nan=tl.PropagateNan.ALL)
        state = larger if TROPICAL else tl.fma(decay, state, x)
        row += 1
    tl.store(state_ptrs, state, mask=inside)


def candidates(call: Call, target: GpuTarget) -> tuple[DeviceLaunch, ...]:
    """Return the single way: one launch."""
    (channels,) = call.shape("x")
    block = min(triton.next_power_of_2(channels), _MOST_CHANNELS)
    initial = float(call.plain("initial"))
    arguments = named_arguments(linear_recurrence_kernel, call, initial=initial, state_ptr=call.state("state"))
    constants = {"CHANNELS": channels, "TROPICAL": call.plain("tropical"), "BLOCK": block}
    grid = (str(triton.cdiv(channels, block)), str(Count.REQUESTS))
    return (DeviceLaunch(linear_recurrence_kernel, arguments, constants, grid, num_warps=2),)


linear_recurrence = KernelTemplate(
    torch.ops.llmc.linear_recurrence_with_state.default,
    takes("x[tokens | channels] decay[tokens | channels]", typed=()),
    candidates,
)
