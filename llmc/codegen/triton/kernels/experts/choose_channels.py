"""llmc::top_k, llmc::take_channels, llmc::mark_channels: how routers choose; a program for each row.

A row is a few hundred numbers at most, which stay in registers while the largest is looked for again and again.
"""

import torch
import triton
import triton.language as tl
from torch import fx

from llmc.codegen.call import Call
from llmc.codegen.triton.kernel import DeviceLaunch, KernelTemplate, named_arguments
from llmc.codegen.triton.kernels.refusals import refuse_dtypes, refuse_ranks, takes, tensors_of
from llmc.graph.refusal import Refusal
from llmc.targets import GpuTarget

_llmc = torch.ops.llmc
_MOST_CHANNELS = 4096


@triton.jit
def top_k_kernel(
    x_ptr: tl.tensor,
    x_row_stride: int,
    values_ptr: tl.tensor,
    values_row_stride: int,
    index_ptr: tl.tensor,
    index_row_stride: int,
    CHANNELS: tl.constexpr,
    COUNT: tl.constexpr,
) -> None:
    """Program (t, g): the COUNT largest of group g of token t, of equals the lower channel first; NaN is largest."""
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    BLOCK: tl.constexpr = triton.next_power_of_2(CHANNELS)
    channel = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + token * x_row_stride + group * CHANNELS + channel, mask=channel < CHANNELS, other=0.0)
    x = x.to(tl.float32)
    rank = tl.where(x != x, float("inf"), x)
    is_left = channel < CHANNELS
    for place in range(COUNT):
        largest = tl.max(tl.where(is_left, rank, float("-inf")), 0)
        found = tl.min(tl.where(is_left & (rank == largest), channel, BLOCK), 0)
        value = tl.sum(tl.where(channel == found, x, 0.0), 0)
        to = group * COUNT + place
        tl.store(values_ptr + token * values_row_stride + to, value.to(values_ptr.dtype.element_ty))
        tl.store(index_ptr + token * index_row_stride + to, found.to(index_ptr.dtype.element_ty))
        is_left = is_left & (channel != found)


@triton.jit
def take_channels_kernel(
    x_ptr: tl.tensor,
    x_row_stride: int,
    index_ptr: tl.tensor,
    index_row_stride: int,
    y_ptr: tl.tensor,
    y_row_stride: int,
    TAKEN: tl.constexpr,
) -> None:
    """Program t: y[t, i] = x[t, index[t, i]]."""
    token, place = tl.program_id(0).to(tl.int64), tl.arange(0, triton.next_power_of_2(TAKEN))
    inside = place < TAKEN
    channel = tl.load(index_ptr + token * index_row_stride + place, mask=inside, other=0)
    y = tl.load(x_ptr + token * x_row_stride + channel, mask=inside)
    tl.store(y_ptr + token * y_row_stride + place, y, mask=inside)


@triton.jit
def mark_channels_kernel(
    index_ptr: tl.tensor,
    index_row_stride: int,
    y_ptr: tl.tensor,
    y_row_stride: int,
    CHANNELS: tl.constexpr,
    MARKED: tl.constexpr,
) -> None:
    """Program t: y[t, c] says whether c is among index[t]."""
    BLOCK: tl.constexpr = triton.next_power_of_2(CHANNELS)
    token, channel = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    marked = tl.zeros([BLOCK], dtype=tl.int32)
    for place in range(MARKED):
        marked |= (tl.load(index_ptr + token * index_row_stride + place) == channel).to(tl.int32)
    to = y_ptr + token * y_row_stride + channel
    tl.store(to, marked.to(y_ptr.dtype.element_ty), mask=channel < CHANNELS)


def supports_x(node: fx.Node, target: GpuTarget) -> Refusal | None:
    """x: [tokens, channels], or of top_k [tokens, groups, channels], of a float dtype."""
    ranks = (2, 3) if node.target is _llmc.top_k.default else (2,)
    channels = tensors_of(node)["x"].shape[-1]
    if channels > _MOST_CHANNELS:
        return Refusal(f"there are {channels} channels; the kernel knows up to {_MOST_CHANNELS}", node)
    return refuse_dtypes(node, "x") or refuse_ranks(node, x=ranks)


def _top_k(call: Call, target: GpuTarget) -> tuple[DeviceLaunch, ...]:
    *groups, channels = call.shape("x")
    arguments = named_arguments(top_k_kernel, call, ("values", "index"))
    constants = {"CHANNELS": channels, "COUNT": call.plain("count")}
    grid = (str(call.count("x")), str(*groups or (1,)))
    return (DeviceLaunch(top_k_kernel, arguments, constants, grid, num_warps=1),)


def _take(call: Call, target: GpuTarget) -> tuple[DeviceLaunch, ...]:
    (taken,) = call.shape("index")
    arguments, constants = named_arguments(take_channels_kernel, call), {"TAKEN": taken}
    return (DeviceLaunch(take_channels_kernel, arguments, constants, (str(call.count("index")),), num_warps=1),)


def _mark(call: Call, target: GpuTarget) -> tuple[DeviceLaunch, ...]:
    channels, (marked,) = call.plain("channels"), call.shape("index")
    arguments = named_arguments(mark_channels_kernel, call)
    constants = {"CHANNELS": channels, "MARKED": marked}
    return (DeviceLaunch(mark_channels_kernel, arguments, constants, (str(call.count("index")),), num_warps=1),)


top_k = KernelTemplate(_llmc.top_k.default, supports_x, _top_k)
take_channels = KernelTemplate(_llmc.take_channels.default, supports_x, _take)
mark_channels = KernelTemplate(_llmc.mark_channels.default, takes("index[tokens | marked]", typed=()), _mark)
