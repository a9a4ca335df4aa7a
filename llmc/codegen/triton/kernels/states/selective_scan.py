"""llmc::selective_scan_with_state: S[c, n] ← exp(dt[c]·A[c, n])·S[c, n] + dt[c]·x[c]·B[n]; y[c] = Σ_n S[c, n]·C[n].

A program takes a block of channels of one request through its tokens, their states in registers; the next tokens are on
their way meanwhile. Moves 12·T·C + 8·R·C·N bytes, and B and C for each block.
"""

import torch
import triton
import triton.language as tl
from torch import fx

from llmc.codegen.call import Call
from llmc.codegen.triton.kernel import DeviceLaunch, KernelTemplate, named_arguments
from llmc.codegen.triton.kernels.agreed_sums import sum_of_products
from llmc.codegen.triton.kernels.refusals import refuse_ranks, tensors_of
from llmc.codegen.triton.kernels.states.carried import carried
from llmc.graph.refusal import Refusal
from llmc.program.launch_arguments import Count
from llmc.targets import GpuTarget

# Elements of a state in a warp's registers.
_ELEMENTS = 512
_MOST_WARPS = 8


@triton.jit
def selective_scan_kernel(
    x_ptr: tl.tensor,
    x_row_stride: int,
    dt_ptr: tl.tensor,
    dt_row_stride: int,
    A_ptr: tl.tensor,
    B_ptr: tl.tensor,
    B_row_stride: int,
    C_ptr: tl.tensor,
    C_row_stride: int,
    y_ptr: tl.tensor,
    y_row_stride: int,
    state_ptr: tl.tensor,
    query_starts_ptr: tl.tensor,
    context_lens_ptr: tl.tensor,
    state_slots_ptr: tl.tensor,
    CHANNELS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Program (j, r): the j-th BLOCK channels of request r. A channel's state has SIZE numbers."""
    first, end, slot, earlier = carried(tl.program_id(1), query_starts_ptr, context_lens_ptr, state_slots_ptr)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    n = tl.arange(0, triton.next_power_of_2(SIZE))
    held = inside[:, None] & (n < SIZE)[None, :]
    places = channel[:, None] * SIZE + n[None, :]
    rates = tl.load(A_ptr + places, mask=held, other=0.0)
    state_ptrs = state_ptr + slot * (CHANNELS * SIZE) + places
    state = tl.load(state_ptrs, mask=held & (n < tl.where(earlier > 0, SIZE, 0))[None, :], other=0.0)
    row = first.to(tl.int64)
    for _ in tl.range(first, end, num_stages=3):
        x = tl.load(x_ptr + row * x_row_stride + channel, mask=inside, other=0.0)
        dt = tl.load(dt_ptr + row * dt_row_stride + channel, mask=inside, other=0.0)
        b = tl.load(B_ptr + row * B_row_stride + n, mask=n < SIZE, other=0.0)
        c = tl.load(C_ptr + row * C_row_stride + n, mask=n < SIZE, other=0.0)
        state = tl.exp(dt[:, None] * rates) * state + (dt * x)[:, None] * b[None, :]
        tl.store(y_ptr + row * y_row_stride + channel, sum_of_products(state, c[None, :], 1), mask=inside)
        row += 1
    tl.store(state_ptrs, state, mask=held)


def supports(node: fx.Node, target: GpuTarget) -> Refusal | None:
    """x: [tokens, channels], with states that a program's registers hold."""
    size, most = tensors_of(node)["A"].shape[1], _ELEMENTS * _MOST_WARPS
    if size > most:
        return Refusal(f"a channel's state has {size} numbers; the kernel takes {most} at most", node)
    return refuse_ranks(node, x=(2,))


def candidates(call: Call, target: GpuTarget) -> tuple[DeviceLaunch, ...]:
    """Return the single way: one launch."""
    channels, size = call.shape("A")
    size_block = triton.next_power_of_2(size)
    block = min(triton.next_power_of_2(channels), max(1, _ELEMENTS // size_block))
    arguments = named_arguments(selective_scan_kernel, call, state_ptr=call.state("state"))
    constants = {"CHANNELS": channels, "SIZE": size, "BLOCK": block}
    grid = (str(triton.cdiv(channels, block)), str(Count.REQUESTS))
    warps = max(1, block * size_block // _ELEMENTS)
    return (DeviceLaunch(selective_scan_kernel, arguments, constants, grid, num_warps=warps),)


selective_scan = KernelTemplate(torch.ops.llmc.selective_scan_with_state.default, supports, candidates)
