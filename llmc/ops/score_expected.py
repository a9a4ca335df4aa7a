"""llmc::score_expected — the attention that a request's keys can expect from queries after the last token.

    S[h, r] = Σ_f Re(q̄[h, f] · g[f] · conj k[r, f]) + (a[h, f] - |q̄[h, f]|) · |k[r, f]|
    g[f] = mean of exp(i ω[f] (t + δ)) over the distances δ = 1, 2, 4, … 65536, from the next token's position t
over pairs f of rotated channels as complex numbers. q̄ is the mean query before its rotation, and a the mean size of its
pairs. Keys are read as they were rotated: their positions cancel out. Channels that are not rotated add q̄ · k.
Source: Mao et al. 2026, "TriAttention: Efficient long reasoning with trigonometric KV compression".
"""

import torch
from torch import Tensor

from llmc.graph.op_record import OpCall
from llmc.ops.compact_kv import Compaction
from llmc.ops.registry import FROM_SERVING, op, per_element
from llmc.ops.rotate_heads import rotated
from llmc.ops.score_keys import stored_rows

# Distances of later queries: powers of two below 2 to this power.
_POWERS = 17
_LEAST_DEVIATION = 1e-6


def means_of(total: Tensor, sizes: Tensor, count: int, scale: float, interleaved: bool) -> Tensor:
    """The means of queries, as score_expected takes them: [heads, channels + rotary / 2], fp32.

    Args:
        total: Sum of the queries, [heads, channels], fp64.
        sizes: Sum of the absolute values of their pairs, [heads, rotary / 2], fp64.
        count: Number of queries.
        scale: The factor of the rotation, which queries have too.
        interleaved: The order of pairs, as for llmc::rope.
    """
    means, half = total / count, sizes.shape[1]
    means[:, : 2 * half] *= scale
    excess = scale * sizes / count - torch.hypot(*pairs(means, half, interleaved))
    return torch.cat((means, excess), dim=1).float()


def pairs(x: Tensor, half: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Return both channels of each pair that llmc::rope rotates, [..., half] each. x: [..., channels]."""
    turning = x[..., : 2 * half]
    if interleaved:
        return turning[..., 0::2], turning[..., 1::2]
    return turning[..., :half], turning[..., half:]


def weights_at(means: Tensor, inv_freq: Tensor, tokens: int, interleaved: bool) -> Tensor:
    """The weights of a key's parts (`parts_of`) for each query head, for queries after `tokens` tokens.

    means: [heads, channels + rotary / 2]. Returns the same shape, fp32.
    """
    later = tokens + 2.0 ** torch.arange(_POWERS, dtype=torch.float64)
    angles = later[:, None] * inv_freq.double()
    cos, sin = angles.cos().mean(0), angles.sin().mean(0)
    found, half = means.double(), inv_freq.shape[0]
    first, second = (each.clone() for each in pairs(found, half, interleaved))
    to_first, to_second = pairs(found, half, interleaved)
    to_first.copy_(first * cos - second * sin)
    to_second.copy_(first * sin + second * cos)
    return found.float()


def parts_of(keys: Tensor, half: int, interleaved: bool) -> Tensor:
    """The channels of keys, and the absolute values of their pairs: [..., channels + half]."""
    first, second = pairs(keys, half, interleaved)
    return torch.cat((keys, (first.square() + second.square()).sqrt()), dim=-1)


def _means_fit(call: OpCall) -> str | None:
    means, half, kv_heads = call.shape("means"), call.shape("inv_freq")[0], call.shape("k_cache")[1]
    fits = len(means) == 2 and means[0] % kv_heads == 0 and means[1] >= 3 * half
    return None if fits else f"means {means} are not those of query heads of {kv_heads} KV heads with {half} pairs"


@op(
    fake=lambda a: a.k_cache.new_empty((1, a.k_cache.shape[1] * a.longest), dtype=torch.float32),
    stages=FROM_SERVING,
    flops=per_element(0),
    check=_means_fit,
)
def score_expected(
    k_cache: Tensor,
    compaction: Tensor,
    means: Tensor,
    inv_freq: Tensor,
    interleaved: bool,
    is_spread: bool,
    sinks: int,
    recent: int,
    longest: int,
    cache_format: str | None = None,
) -> Tensor:
    """The scores of a request's rows: [1, kv_heads · longest], fp32.

    S is standardized for each query head over the rows that may leave. A row's score is the largest one among the query
    heads of its KV head. Pinned rows score infinity, other rows that stay 0.

    Args:
        k_cache, longest: The arguments of score_keys.
        compaction: The compaction, as for compact_kv, without queries.
        means: q̄ by channels, then a - |q̄| by pairs, [heads, channels + rotary / 2], fp32; both times the factor of the
            rotation.
        inv_freq: [rotary / 2]: keys were rotated by llmc::rope with their positions' angles.
        interleaved: The order of pairs, as for llmc::rope.
        is_spread: Whether rotate_heads was applied to keys after that.
        sinks, recent: Numbers of first and last rows that are kept, as for compact_kv.
    """
    heads, block_size = k_cache.shape[1:3]
    found = k_cache.new_zeros((heads, longest), dtype=torch.float32)
    if len(compaction):
        this, half = Compaction.of(compaction, block_size), inv_freq.shape[0]
        found[:, : this.pinned] = float("inf")
        free = slice(max(sinks, this.pinned), max(sinks, this.pinned, this.rows - recent))
        keys = stored_rows(k_cache, this, means.shape[1] - half, cache_format)[free].float()
        parts = parts_of(rotated(keys) if is_spread else keys, half, interleaved)
        weights = weights_at(means, inv_freq, this.tokens, interleaved).view(heads, -1, means.shape[1])
        if len(parts):
            scores = torch.einsum("kgc,rkc->kgr", weights, parts).double()
            deviation = scores.std(-1, correction=0, keepdim=True).clamp_min(_LEAST_DEVIATION)
            found[:, free] = ((scores - scores.mean(-1, keepdim=True)) / deviation).amax(1).float()
    return found.view(1, -1)
