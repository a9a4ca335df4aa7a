"""Sums over ranks, with the residual sum and the norm that follow: y = norm(residual + Σ_r x_r) · weight + bias.

Σ is computed in fp32 in the order of ranks and rounded once, from either source: the ranks' memory, to which each
program first writes its own values (reduce_rows_kernel, few rows), or rows that a library has gathered (many rows). So
a token's bits do not depend on the number of tokens in a step. A program handles one row with a norm, else a block.
"""

import triton
import triton.language as tl

from llmc.codegen.triton.kernels.agreed_sums import sum_of_products
from llmc.codegen.triton.kernels.ranks.exchange import (
    await_ranks,
    end_exchange,
    exchange_number,
    place_of,
    tell_ranks,
)
from llmc.codegen.triton.kernels.rows.norm_rows import centred, store_rows


@triton.jit
def reduce_rows_kernel(
    ranks_ptr: tl.tensor,
    x_ptr: tl.tensor,
    x_row_stride: int,
    residual_ptr: tl.tensor,
    residual_row_stride: int,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    y_ptr: tl.tensor,
    y_row_stride: int,
    sum_ptr: tl.tensor,
    sum_row_stride: int,
    rows: int,
    eps: float,
    NORMED: tl.constexpr,
    CENTRED: tl.constexpr,
    RANKS: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,
    FLAGS: tl.constexpr,
    LOST: tl.constexpr,
    AT: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    """Program (t, j): the j-th BLOCK channels of row t, all of them where there is a norm."""
    number = exchange_number(ranks_ptr)
    program = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    put_row(ranks_ptr, number, program, x_ptr, x_row_stride, RANKS, CHANNELS, BLOCK, FLAGS, AT, SIZE)
    await_ranks(ranks_ptr, number, program, FLAGS, LOST, RANKS)
    take_row(
        ranks_ptr, number, x_ptr, residual_ptr, residual_row_stride, weight_ptr, bias_ptr, y_ptr, y_row_stride, sum_ptr,
        sum_row_stride, eps, NORMED, CENTRED, RANKS, CHANNELS, BLOCK, AT_ONCE, AT, SIZE,
    )  # fmt: skip
    end_exchange(ranks_ptr, number, rows * tl.num_programs(1))


@triton.jit
def put_row(
    ranks_ptr: tl.tensor,
    number: tl.tensor,
    program: tl.tensor,
    x_ptr: tl.tensor,
    x_row_stride: tl.tensor,
    RANKS: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    FLAGS: tl.constexpr,
    AT: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    """This program's values into this rank's place, and the others told so."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    place = place_of(ranks_ptr, tl.load(ranks_ptr), number, x_ptr, AT, SIZE)
    values = tl.load(x_ptr + row * x_row_stride + channel, mask=inside)
    tl.store(place + row * CHANNELS + channel, values, mask=inside)
    tell_ranks(ranks_ptr, number, program, FLAGS, RANKS)


@triton.jit
def take_row(
    ranks_ptr: tl.tensor,
    number: tl.tensor,
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    residual_row_stride: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    y_ptr: tl.tensor,
    y_row_stride: tl.tensor,
    sum_ptr: tl.tensor,
    sum_row_stride: tl.tensor,
    eps: tl.tensor,
    NORMED: tl.constexpr,
    CENTRED: tl.constexpr,
    RANKS: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,
    AT: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    """The sum of all ranks' values, and what follows it."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = (row * CHANNELS + channel)[None, :]
    inside = (channel < CHANNELS)[None, :]
    # Negative zeros, to which whatever is added stays itself.
    total = tl.full([1, BLOCK], -0.0, dtype=tl.float32)
    # AT_ONCE loads at once, limited by registers: sequential loads would each wait for the link.
    for first in range(0, RANKS, AT_ONCE):
        for i in tl.static_range(AT_ONCE):
            place = place_of(ranks_ptr, tl.minimum(first + i, RANKS - 1), number, x_ptr, AT, SIZE)
            total += tl.load(place + at, mask=inside & (first + i < RANKS), other=-0.0).to(tl.float32)
    finish_row(
        total, x_ptr, residual_ptr, residual_row_stride, weight_ptr, bias_ptr, y_ptr, y_row_stride, sum_ptr,
        sum_row_stride, eps, row, channel, inside, NORMED, CENTRED, CHANNELS,
    )  # fmt: skip


@triton.jit
def sum_gathered_kernel(
    gathered_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    residual_row_stride: int,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    y_ptr: tl.tensor,
    y_row_stride: int,
    sum_ptr: tl.tensor,
    sum_row_stride: int,
    rows: int,
    eps: float,
    NORMED: tl.constexpr,
    CENTRED: tl.constexpr,
    RANKS: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """As reduce_rows_kernel, of values that lie in gathered, [RANKS, rows, CHANNELS]."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (channel < CHANNELS)[None, :]
    total = tl.full([1, BLOCK], -0.0, dtype=tl.float32)
    for rank in range(RANKS):
        at = ((rank * rows + row) * CHANNELS + channel)[None, :]
        total += tl.load(gathered_ptr + at, mask=inside, other=-0.0).to(tl.float32)
    finish_row(
        total, gathered_ptr, residual_ptr, residual_row_stride, weight_ptr, bias_ptr, y_ptr, y_row_stride, sum_ptr,
        sum_row_stride, eps, row, channel, inside, NORMED, CENTRED, CHANNELS,
    )  # fmt: skip


@triton.jit
def sum_shares_kernel(
    rank_ptr: tl.tensor,
    parts_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    residual_row_stride: int,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    y_ptr: tl.tensor,
    y_row_stride: int,
    sum_ptr: tl.tensor,
    sum_row_stride: int,
    rows: int,
    eps: float,
    NORMED: tl.constexpr,
    CENTRED: tl.constexpr,
    RANKS: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """As sum_gathered_kernel, of this rank's share of the rows, `rows` // RANKS, and of those behind all shares.

    Program i: the share's i-th row, and then the rest's rows. parts: [RANKS, share + rest, CHANNELS]; rank_ptr: to this
    rank's number.
    """
    index = tl.program_id(0).to(tl.int64)
    share = (rows // RANKS).to(tl.int64)
    own = rows - share * (RANKS - 1)
    if index >= own:
        return
    row = tl.where(index < share, tl.load(rank_ptr) * share, share * (RANKS - 1)) + index
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (channel < CHANNELS)[None, :]
    total = tl.full([1, BLOCK], -0.0, dtype=tl.float32)
    for rank in range(RANKS):
        at = ((rank * own + index) * CHANNELS + channel)[None, :]
        total += tl.load(parts_ptr + at, mask=inside, other=-0.0).to(tl.float32)
    finish_row(
        total, parts_ptr, residual_ptr, residual_row_stride, weight_ptr, bias_ptr, y_ptr, y_row_stride, sum_ptr,
        sum_row_stride, eps, row, channel, inside, NORMED, CENTRED, CHANNELS,
    )  # fmt: skip


@triton.jit
def finish_row(
    total: tl.tensor,
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    residual_row_stride: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    y_ptr: tl.tensor,
    y_row_stride: tl.tensor,
    sum_ptr: tl.tensor,
    sum_row_stride: tl.tensor,
    eps: tl.tensor,
    row: tl.tensor,
    channel: tl.tensor,
    inside: tl.tensor,
    NORMED: tl.constexpr,
    CENTRED: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    """Round the sum to x's dtype, add the residual and round that, norm it, and store what there is to store.

    total: [1, BLOCK], 0 outside.
    """
    s = total.to(x_ptr.dtype.element_ty).to(tl.float32)
    if residual_ptr is not None:
        residual = residual_ptr + row * residual_row_stride + channel[None, :]
        s += tl.load(residual, mask=inside, other=0.0).to(tl.float32)
        s = s.to(x_ptr.dtype.element_ty).to(tl.float32)
    y = s
    if NORMED:
        mean = tl.zeros([1], dtype=tl.float32)
        if CENTRED:
            mean = tl.sum(s, axis=1) / CHANNELS
        y = centred(s, mean, inside, CENTRED)
        y *= tl.rsqrt(sum_of_products(y, y, 1) / CHANNELS + eps)[:, None]
    y_row, sum_row = tl.zeros([1], dtype=tl.int64), tl.zeros([1], dtype=tl.int64)
    y_row += row * y_row_stride
    sum_row += row * sum_row_stride
    store_rows(y, s, weight_ptr, bias_ptr, y_ptr, y_row, sum_ptr, sum_row, channel, inside, CHANNELS)
