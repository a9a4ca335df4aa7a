"""Rotary position embedding: llmc::rope_angles, llmc::rope, and llmc::rope_kv_write.

Source: Su et al. 2021, "RoFormer". `rotary` is the number of channels that turn: all of head_dim, or fewer.
"""

from typing import Any

import torch
from torch import Tensor

from llmc.formats.cache_format import parts_of_pair
from llmc.graph.op_record import OpCall
from llmc.ops.kv_write import write_slots
from llmc.ops.registry import FROM_CAPTURED, WHEN_OPTIMIZED, op, per_element


def _angles(a: Any) -> tuple[Tensor, Tensor]:
    shape = (a.positions.shape[0], a.inv_freq.shape[0])
    return a.inv_freq.new_empty(shape, dtype=torch.float32), a.inv_freq.new_empty(shape, dtype=torch.float32)


def _angles_fit(call: OpCall) -> str | None:
    x, cos, sin = call.shape("x"), call.shape("cos"), call.shape("sin")
    if len(x) != 3 or len(cos) != 2 or len(sin) != 2:
        return f"rope needs x [tokens, heads, head_dim] and angles [tokens, rotary / 2], got {x}, {cos}, {sin}"
    return None if 2 * cos[1] <= x[2] else f"{2 * cos[1]} channels turn but a head has {x[2]}"


@op(fake=_angles, stages=FROM_CAPTURED, flops=per_element(20), rows=("positions",))
def rope_angles(positions: Tensor, inv_freq: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """cos and sin of positions[t]·inv_freq[i], times scale (yarn's attention factor).

    positions: [tokens], integer; inv_freq: [rotary / 2], fp32; returns two [tokens, rotary / 2], fp32.
    """
    angles = positions.float()[:, None] * inv_freq.float()[None, :]
    return angles.cos() * scale, angles.sin() * scale


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """The rotation itself, in fp32. x: [tokens, heads, head_dim]; cos, sin: [tokens, rotary / 2]."""
    half = cos.shape[1]
    turning, rest = x[..., : 2 * half].float(), x[..., 2 * half :]
    cos, sin = cos[:, None, :].float(), sin[:, None, :].float()
    first, second = (turning[..., 0::2], turning[..., 1::2]) if interleaved else turning.split(half, dim=-1)
    pair = (first * cos - second * sin, second * cos + first * sin)
    turned = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat((turned.to(x.dtype), rest), dim=-1)


@op(
    fake=lambda a: a.x.new_empty(a.x.shape),
    stages=FROM_CAPTURED,
    flops=per_element(3),
    rows=("x", "cos", "sin"),
    check=_angles_fit,
    axes="x[t h d!] -> [t h d!]",
)
def rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate pairs of channels by the position's angle. x: [tokens, heads, head_dim]; cos, sin: [tokens, rotary / 2].

    interleaved: the pairs are (0, 1), (2, 3), …; otherwise (i, i + rotary / 2), which HF calls rotate_half.
    Channels from rotary on pass unchanged. Computed in fp32, rounded once to x's dtype.
    """
    return rotate(x, cos, sin, interleaved)


@op(fake=lambda a: a.q.new_empty(a.q.shape), stages=WHEN_OPTIMIZED, flops=per_element(3), writes=("k_cache", "v_cache"))
def rope_kv_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    interleaved: bool,
    cache_format: str | None = None,
) -> Tensor:
    """Rotate q and k, write k and v to their slots, return q rotated: llmc::rope twice and llmc::kv_write in one pass.

    q: [tokens, heads, head_dim]; k, v: [tokens, kv_heads, head_dim]; the rest as in rope and kv_write.
    """
    keys, values = parts_of_pair(cache_format)
    write_slots(rotate(k, cos, sin, interleaved), k_cache, slot_mapping, keys)
    write_slots(v, v_cache, slot_mapping, values)
    return rotate(q, cos, sin, interleaved)
