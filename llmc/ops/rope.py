"""Rotary position embedding: llmc::rope_angles, llmc::rope, and llmc::rope_kv_write.

Source: Su et al. 2021, "RoFormer". `rotary` is the number of channels that turn: all of head_dim, or fewer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmc.ops.kv_cache import write_slots
from llmc.ops.registry import op


def _fake_angles(positions: Tensor, inv_freq: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    shape = (positions.shape[0], inv_freq.shape[0])
    return inv_freq.new_empty(shape, dtype=torch.float32), inv_freq.new_empty(shape, dtype=torch.float32)


@op("rope_angles(Tensor positions, Tensor inv_freq, float scale) -> (Tensor, Tensor)", fake=_fake_angles)
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


def _fake_rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    return x.new_empty(x.shape)


@op("rope(Tensor x, Tensor cos, Tensor sin, bool interleaved) -> Tensor", fake=_fake_rope)
def rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate pairs of channels by the position's angle. x: [tokens, heads, head_dim]; cos, sin: [tokens, rotary / 2].

    interleaved: the pairs are (0, 1), (2, 3), …; otherwise (i, i + rotary / 2), which HF calls rotate_half.
    Channels from rotary on pass unchanged. Computed in fp32, rounded once to x's dtype.
    """
    return rotate(x, cos, sin, interleaved)


def _fake_rope_kv_write(
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
    return q.new_empty(q.shape)


@op(
    "rope_kv_write(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor(a!) k_cache, Tensor(b!) v_cache, "
    "Tensor slot_mapping, bool interleaved, str? cache_format=None) -> Tensor",
    fake=_fake_rope_kv_write,
)
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
    write_slots(rotate(k, cos, sin, interleaved), k_cache, slot_mapping, cache_format)
    write_slots(v, v_cache, slot_mapping, cache_format)
    return rotate(q, cos, sin, interleaved)
