"""llmc::all_gather: the concatenation of all ranks' channels, without the padding of each rank.

Few rows are read from the ranks' memory (exchange.py); more rows are gathered by a library first. Memory-bound: reads
this rank's rows once, and writes the rows of all ranks once.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl

from llmc.codegen.call import Call
from llmc.codegen.triton.kernel import DeviceLaunch, KernelTemplate, named_arguments
from llmc.codegen.triton.kernels.ranks.exchange import await_ranks, end_exchange, exchange_number, place_of
from llmc.codegen.triton.kernels.ranks.reduce_rows import put_row
from llmc.codegen.triton.kernels.ranks.reduce_ways import (
    RANKS,
    gather_launch,
    memory_constants,
    memory_seconds,
    most_rows,
)
from llmc.codegen.triton.kernels.refusals import takes
from llmc.targets import GpuTarget

_BLOCK = 2048
_ELEMENTS_PER_WARP = 256


@triton.jit
def gather_channels_kernel(
    ranks_ptr: tl.tensor,
    x_ptr: tl.tensor,
    x_row_stride: int,
    ends_ptr: tl.tensor,
    y_ptr: tl.tensor,
    y_row_stride: int,
    rows: int,
    RANKS: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    FLAGS: tl.constexpr,
    LOST: tl.constexpr,
    AT: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    """Program (t, j): the j-th BLOCK of each rank's CHANNELS of row t."""
    number = exchange_number(ranks_ptr)
    program = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    put_row(ranks_ptr, number, program, x_ptr, x_row_stride, RANKS, CHANNELS, BLOCK, FLAGS, AT, SIZE)
    await_ranks(ranks_ptr, number, program, FLAGS, LOST, RANKS)
    take_channels(
        ranks_ptr, number, x_ptr, ends_ptr, y_ptr, y_row_stride, RANKS, CHANNELS, BLOCK, AT, SIZE
    )  # fmt: skip
    end_exchange(ranks_ptr, number, rows * tl.num_programs(1))


@triton.jit
def take_channels(
    ranks_ptr: tl.tensor,
    number: tl.tensor,
    x_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    y_ptr: tl.tensor,
    y_row_stride: tl.tensor,
    RANKS: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    AT: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    """Each rank's values to where they belong."""
    row = tl.program_id(0).to(tl.int64)
    for rank in tl.static_range(RANKS):
        place = place_of(ranks_ptr, rank, number, x_ptr, AT, SIZE)
        put_channels(place + row * CHANNELS, row, rank, ends_ptr, y_ptr, y_row_stride, BLOCK)


@triton.jit
def put_channels(
    from_ptr: tl.tensor,
    row: tl.tensor,
    rank: tl.constexpr,
    ends_ptr: tl.tensor,
    y_ptr: tl.tensor,
    y_row_stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """A block of one rank's channels; from_ptr: to its row."""
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    start = 0
    if rank > 0:
        start = tl.load(ends_ptr + rank - 1)
    inside = channel < tl.load(ends_ptr + rank) - start
    tl.store(y_ptr + row * y_row_stride + start + channel, tl.load(from_ptr + channel, mask=inside), mask=inside)


@triton.jit
def join_channels_kernel(
    gathered_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    y_ptr: tl.tensor,
    y_row_stride: int,
    rows: int,
    RANKS: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Program (t, j): as gather_channels_kernel, of values that lie in gathered, [RANKS, rows, CHANNELS]."""
    row = tl.program_id(0).to(tl.int64)
    for rank in tl.static_range(RANKS):
        from_rank = gathered_ptr + (rank * rows + row) * CHANNELS
        put_channels(from_rank, row, rank, ends_ptr, y_ptr, y_row_stride, BLOCK)


def candidates(call: Call, target: GpuTarget) -> tuple[DeviceLaunch, ...]:
    """Return the ways to gather: through the ranks' memory for few rows, and by a library for more."""
    x, count, dtype = call.rows("x"), call.count("x"), call.dtype("x")
    (channels,), (ranks,) = call.shape("x"), call.shape("ends")
    assert x is not None
    block = min(_BLOCK, triton.next_power_of_2(channels))
    grid = str(count), str(-(-channels // block))
    warps = max(1, min(16, block // _ELEMENTS_PER_WARP))
    row_bytes = channels * dtype.itemsize
    sizes = {"CHANNELS": channels, "BLOCK": block}
    most = most_rows(row_bytes, -(-channels // block), ranks, target)
    launches = []
    if most:
        own = named_arguments(gather_channels_kernel, call, ranks_ptr=RANKS, rows=count)
        seconds = memory_seconds(most * row_bytes, ranks, target)
        constants = {**sizes, **memory_constants(ranks)}
        launches.append(
            DeviceLaunch(gather_channels_kernel, own, constants, grid, warps, max_tokens=most, seconds=seconds)
        )
    whole = call.workspace("gathered", count, ranks * channels, dtype)
    arguments = named_arguments(join_channels_kernel, call, gathered_ptr=whole.pointer, rows=count)
    join = DeviceLaunch(join_channels_kernel, arguments, {**sizes, "RANKS": ranks}, grid, warps)
    moved = ranks * call.limits().max_batch_tokens * row_bytes
    seconds = target.links.of(ranks).all_gather(moved, ranks, custom=False)
    gather = replace(gather_launch(x, whole, count, channels, ranks), min_tokens=most + 1, seconds=seconds)
    return (*launches, replace(gather, then=(join,)))


all_gather = KernelTemplate(torch.ops.llmc.all_gather.default, takes("x[rows | channels]"), candidates)
