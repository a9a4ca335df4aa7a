"""The two halves of kernels of ranks as kernels of their own, which one process can run for all ranks in turn."""

from __future__ import annotations

import triton
import triton.language as tl

from llmc.codegen.triton.kernels.ranks.all_gather import take_channels
from llmc.codegen.triton.kernels.ranks.exchange import await_ranks, end_exchange, exchange_number
from llmc.codegen.triton.kernels.ranks.reduce_rows import put_row, take_row


@triton.jit
def put_kernel(
    ranks_ptr: tl.tensor,
    x_ptr: tl.tensor,
    x_row_stride: int,
    RANKS: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    FLAGS: tl.constexpr,
    AT: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    """The first half of each kernel."""
    program = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    put_row(
        ranks_ptr, exchange_number(ranks_ptr), program, x_ptr, x_row_stride, RANKS, CHANNELS, BLOCK, FLAGS, AT, SIZE
    )


@triton.jit
def take_sum_kernel(
    ranks_ptr: tl.tensor,
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    y_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    rows: int,
    eps: float,
    NORMED: tl.constexpr,
    CENTRED: tl.constexpr,
    RANKS: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    FLAGS: tl.constexpr,
    LOST: tl.constexpr,
    AT: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    """The second half of a sum."""
    number = exchange_number(ranks_ptr)
    await_ranks(ranks_ptr, number, tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), FLAGS, LOST, RANKS)
    take_row(
        ranks_ptr, number, x_ptr, residual_ptr, CHANNELS, weight_ptr, bias_ptr, y_ptr, CHANNELS, sum_ptr, CHANNELS,
        eps, NORMED, CENTRED, RANKS, CHANNELS, BLOCK, 2, AT, SIZE,
    )  # fmt: skip
    end_exchange(ranks_ptr, number, rows * tl.num_programs(1))


@triton.jit
def take_channels_kernel(
    ranks_ptr: tl.tensor,
    x_ptr: tl.tensor,
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
    """The second half of a gather."""
    number = exchange_number(ranks_ptr)
    await_ranks(ranks_ptr, number, tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), FLAGS, LOST, RANKS)
    take_channels(ranks_ptr, number, x_ptr, ends_ptr, y_ptr, y_row_stride, RANKS, CHANNELS, BLOCK, AT, SIZE)
    end_exchange(ranks_ptr, number, rows * tl.num_programs(1))
