"""llmc::rotate_heads — multiply each head's channels by an orthonormal Hadamard matrix, block by block.

    y[i] = Σ_j (-1)^popcount(i AND j) · x[j] / sqrt(n)      for i, j in a block of n = 2^m channels
Two rotated vectors have the inner product of the vectors themselves, and rotating twice is rotating not at all. The
excess of one channel is spread over a whole block, so that rounding to codes loses less.
Source: Ashkboos et al. 2024, "QuaRot".
"""

import math

import torch
from torch import Tensor

from llmc.graph.op_record import OpCall
from llmc.ops.registry import FROM_SERVING, like, op, per_element


def rotation_block(channels: int) -> int:
    """The largest power of two that divides a number of channels."""
    return channels & -channels


def rotated(x: Tensor) -> Tensor:
    """The last axis rotated, in fp32."""
    block = rotation_block(x.shape[-1])
    y, half = x.float().reshape(-1, block), 1
    while half < block:
        a, b = y.reshape(-1, block // (2 * half), 2, half).unbind(2)
        y, half = torch.stack((a + b, a - b), dim=2).reshape(-1, block), 2 * half
    return (y * (1.0 / math.sqrt(block))).reshape(x.shape)


def _parts_fit(call: OpCall) -> str | None:
    shape, first = call.shape("x"), call.arguments["first"]
    fits = len(shape) == 3 and 0 < first <= shape[2]
    return None if fits else f"rotate_heads needs x [tokens, heads, {first} channels or more], got {shape}"


@op(
    fake=like("x"),
    stages=FROM_SERVING,
    flops=per_element(8),
    rows=("x",),
    check=_parts_fit,
    axes="x[t h d!] -> [t h d!]",
)
def rotate_heads(x: Tensor, first: int) -> Tensor:
    """Rotate the channels [0, first) of each head, and those from `first` on apart from them.

    x: [tokens, heads, channels]. The blocks of a part are as large as rotation_block says. In fp32, rounded once.
    """
    parts = [rotated(part) for part in (x[..., :first], x[..., first:]) if part.shape[-1] > 0]
    return torch.cat(parts, dim=-1).to(x.dtype)
