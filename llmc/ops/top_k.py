"""llmc::top_k, llmc::take_channels, llmc::mark_channels — how routers choose: each token's largest channels, what other
values are there, and which channels were chosen."""

from typing import Any

import torch
from torch import Tensor

from llmc.graph.op_record import OpCall
from llmc.ops.registry import FROM_CAPTURED, op, per_element

# Maximum k of kernels, which keep their candidates in order.
MOST_CHANNELS = 64


def _check(call: OpCall) -> str | None:
    count, most = call.arguments["count"], min(MOST_CHANNELS, int(call.shape("x")[-1]))
    return None if 1 <= count <= most else f"count is {count}; from 1 to {most} channels can be found"


def _fake(a: Any) -> tuple[Tensor, Tensor]:
    shape = (*a.x.shape[:-1], a.count)
    return a.x.new_empty(shape), a.x.new_empty(shape, dtype=torch.int64)


@op(fake=_fake, stages=FROM_CAPTURED, flops=per_element(8), rows=("x",), check=_check)
def top_k(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(values, channels): [..., count] each, of x's dtype and int64, the largest first, of equals the lower channel
    first. x: [..., channels], floating."""
    values, channels = x.sort(dim=-1, descending=True, stable=True)
    return values[..., :count].contiguous(), channels[..., :count].contiguous()


@op(fake=lambda a: a.x.new_empty(a.index.shape), stages=FROM_CAPTURED, flops=per_element(1), rows=("x", "index"))
def take_channels(x: Tensor, index: Tensor) -> Tensor:
    """y[..., i] = x[..., index[..., i]]. x: [tokens, channels]; index: [tokens, taken], integer."""
    return x.gather(-1, index.long())


@op(
    fake=lambda a: a.index.new_empty((*a.index.shape[:-1], a.channels), dtype=torch.bool),
    stages=FROM_CAPTURED,
    flops=per_element(1),
    rows=("index",),
)
def mark_channels(index: Tensor, channels: int) -> Tensor:
    """Mark which of `channels` channels are in a token's index. index: [tokens, marked], integer; returns [tokens,
    channels]."""
    marked = index.new_zeros((*index.shape[:-1], channels), dtype=torch.bool)
    return marked.scatter_(-1, index.long(), True)
