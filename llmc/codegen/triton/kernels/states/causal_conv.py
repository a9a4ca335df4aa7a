"""llmc::causal_conv_with_state: y[t, c] = bias[c] + Σ_j weight[j, c]·x[t - width + 1 + j, c].

A program processes a block of channels of one request, a tile of tokens at a time; tokens before the step's come from
the state. Memory-bound: moves 2·T·C elements; a row is read width times, and all reads except the first hit the
cache.
"""

import torch
import triton
import triton.language as tl
from torch import fx

from llmc.codegen.call import Call
from llmc.codegen.triton.kernel import DeviceLaunch, KernelTemplate, named_arguments
from llmc.codegen.triton.kernels.refusals import refuse_dtypes, refuse_ranks, tensors_of
from llmc.codegen.triton.kernels.states.carried import carried
from llmc.graph.refusal import Refusal
from llmc.program.launch_arguments import Count
from llmc.targets import GpuTarget

_MOST_CHANNELS = 64
_TOKENS = 16
# Loops over taps are unrolled.
WIDEST = 32


@triton.jit
def causal_conv_kernel(
    x_ptr: tl.tensor,
    x_row_stride: int,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    y_ptr: tl.tensor,
    y_row_stride: int,
    state_ptr: tl.tensor,
    query_starts_ptr: tl.tensor,
    context_lens_ptr: tl.tensor,
    state_slots_ptr: tl.tensor,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
) -> None:
    """Program (j, r): the j-th BLOCK channels of request r."""
    BEFORE: tl.constexpr = WIDTH - 1
    first, end, slot, earlier = carried(tl.program_id(1), query_starts_ptr, context_lens_ptr, state_slots_ptr)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    own_state_ptr = state_ptr + slot * (BEFORE * CHANNELS)
    # The first token that has a row in x or in the state.
    known = tl.where(earlier > 0, first - BEFORE, first)
    bias = tl.zeros([BLOCK], tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + channel, mask=inside, other=0.0)
    for start in range(first, end, TOKENS):
        token = (start + tl.arange(0, TOKENS))[:, None]
        present = (token < end) & inside[None, :]
        sums = tl.broadcast_to(bias[None, :], [TOKENS, BLOCK])
        for tap in tl.static_range(WIDTH):
            weight = tl.load(weight_ptr + tap * CHANNELS + channel, mask=inside, other=0.0)
            x = _rows(
                x_ptr, x_row_stride, own_state_ptr, token - BEFORE + tap, first, known, channel[None, :], present,
                CHANNELS, BEFORE,
            )  # fmt: skip
            sums = tl.fma(weight[None, :], x, sums)
        y_ptrs = y_ptr + token.to(tl.int64) * y_row_stride + channel[None, :]
        tl.store(y_ptrs, sums.to(y_ptr.dtype.element_ty), mask=present)
    # Other threads may still read the state. Below, a channel is one thread's, and no row is read that was written.
    tl.debug_barrier()
    for row in tl.static_range(BEFORE):
        token = end - BEFORE + row + channel * 0
        x = _rows(x_ptr, x_row_stride, own_state_ptr, token, first, known, channel, inside, CHANNELS, BEFORE)
        tl.store(own_state_ptr + row * CHANNELS + channel, x, mask=inside)


@triton.jit
def _rows(
    x_ptr: tl.tensor,
    x_row_stride: int,
    state_ptr: tl.tensor,
    token: tl.tensor,
    first: tl.tensor,
    known: tl.tensor,
    channel: tl.tensor,
    present: tl.tensor,
    CHANNELS: tl.constexpr,
    BEFORE: tl.constexpr,
) -> tl.tensor:
    """Channels of x at tokens, in fp32; of tokens before the first from the state, and zero before `known`."""
    given = tl.load(x_ptr + token.to(tl.int64) * x_row_stride + channel, mask=present & (token >= first), other=0.0)
    held_ptrs = state_ptr + (token - first + BEFORE) * CHANNELS + channel
    held = tl.load(held_ptrs, mask=present & (token < first) & (token >= known), other=0.0)
    return tl.where(token >= first, given.to(tl.float32), held)


def supports(node: fx.Node, target: GpuTarget) -> Refusal | None:
    """x: [tokens, channels] of a float dtype, and not too many taps."""
    width = tensors_of(node)["weight"].shape[0]
    if width > WIDEST:
        return Refusal(f"the convolution has {width} taps; the kernel takes {WIDEST} at most", node)
    return refuse_dtypes(node, "x") or refuse_ranks(node, x=(2,))


def candidates(call: Call, target: GpuTarget) -> tuple[DeviceLaunch, ...]:
    """Return the single way: one launch."""
    width, channels = call.shape("weight")
    block = min(triton.next_power_of_2(channels), _MOST_CHANNELS)
    arguments = named_arguments(causal_conv_kernel, call, state_ptr=call.state("state"))
    constants = {"CHANNELS": channels, "WIDTH": width, "BLOCK": block, "TOKENS": _TOKENS}
    grid = (str(triton.cdiv(channels, block)), str(Count.REQUESTS))
    return (DeviceLaunch(causal_conv_kernel, arguments, constants, grid),)


causal_conv = KernelTemplate(torch.ops.llmc.causal_conv_with_state.default, supports, candidates)
