"""llmc::score_leverage — how far each of a request's keys stands out, blended with its own chunk's attention to it.

    score[r] = (1 - kept / tokens) · z(leverage[r]) + z(mean over the neighbours of r of attention[r] · |v[r]|)
z subtracts the mean of all heads and rows that may leave, and divides by their standard deviation.
Source: Chari and Van Durme 2025, "Compactor: Calibrated query-agnostic KV cache compression with approximate leverage
scores", as kvpress 0.5.4 computes it.
"""

import math

import torch
from torch import Tensor

from llmc.ops.compact_kv import Compaction
from llmc.ops.registry import FROM_SERVING, op, per_element
from llmc.ops.rope import rotate
from llmc.ops.rotate_heads import rotated
from llmc.ops.score_keys import attention_logits, last_queries, stored_rows

SKETCH = 48
_RIDGE = 1e-2
_SEED = 42
_NEIGHBOURS = 3
_LEAST_DEVIATION = 1e-6


def gaussian_sketch(channels: int) -> Tensor:
    """The fixed matrix that keys are multiplied with, [channels, SKETCH], fp32: normal, with variance 1 / SKETCH."""
    return torch.randn(channels, SKETCH, generator=torch.Generator().manual_seed(_SEED)) / math.sqrt(SKETCH)


def leverage(keys: Tensor, sketch: Tensor) -> Tensor:
    """The leverage of each row, x (XᵀX + εI)⁻¹ xᵀ, of centred keys times the sketch: [heads, rows], fp32.

    keys: [heads, rows, channels], fp32, before their rotation. sketch: [channels, SKETCH].
    """
    x = (keys - keys.mean(1, keepdim=True)) @ sketch
    lower = torch.linalg.cholesky(x.mT @ x + _RIDGE * torch.eye(sketch.shape[1]))
    whitened: Tensor = torch.linalg.solve_triangular(lower, x.mT, upper=False)
    return whitened.square().sum(1)


def chunk_attention(q: Tensor, k: Tensor, scale: float, softcap: float | None) -> Tensor:
    """The attention that each row gets from all queries of its chunk, the later ones too: [kv_heads, rows], fp32.

    q: [rows, heads, head_dim]; k: [rows, kv_heads, head_dim]. Query heads of one KV head are averaged.
    """
    paid = attention_logits(q, k, scale, softcap).softmax(-1).sum(1)
    return paid.view(k.shape[1], -1, len(k)).mean(1)


def blended(leverage: Tensor, attention: Tensor, norms: Tensor, share: float) -> Tensor:
    """The scores of all rows that may leave: [heads, rows], fp32.

    leverage, attention, norms (of values): [heads, rows]. share: weight of the leverage; that of attention is 1.
    """
    pooled = torch.nn.functional.avg_pool1d(
        (attention * norms)[:, None], _NEIGHBOURS, stride=1, padding=_NEIGHBOURS // 2
    )[:, 0]
    return share * _standardized(leverage) + _standardized(pooled)


def _standardized(x: Tensor) -> Tensor:
    return (x - x.mean()) / x.std().clamp_min(_LEAST_DEVIATION)


@op(
    fake=lambda a: tuple(
        a.k_cache.new_empty((1, a.k_cache.shape[1] * a.longest), dtype=torch.float32) for _ in range(3)
    ),
    stages=FROM_SERVING,
    flops=per_element(0),
)
def score_leverage(
    q_first: Tensor,
    q_second: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    attention: Tensor,
    positions: Tensor,
    compaction: Tensor,
    sketch: Tensor,
    inv_freq: Tensor | None,
    interleaved: bool,
    is_spread: bool,
    scale: float,
    softcap: float | None,
    sinks: int,
    recent: int,
    value_dim: int,
    longest: int,
    cache_format: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The scores of a request's rows, the attention that they got in their chunks, and their positions.

    The last queries are a chunk, and their rows get attention now; those before have theirs already. Leverage and
    scores are computed if rows are to leave, of those between the first `sinks` and the last `recent`; all others
    score 0. The first `sinks` rows take no part in their chunk's attention either.

    Args:
        q_first, q_second, k_cache, longest: The arguments of score_keys.
        v_cache: The values' cache, as for kv_write.
        attention, positions: [blocks, kv_heads, block_size, 1], fp32, of the rows before the chunk, as returned for
            them.
        compaction: The compaction, as for compact_kv.
        sketch: [head_dim, SKETCH], fp32.
        inv_freq: [rotary / 2]: keys were rotated by llmc::rope with their positions' angles. None: they were not.
        interleaved: The order of pairs, as for llmc::rope.
        is_spread: Whether rotate_heads was applied to keys after that.
        scale, softcap: Parameters of the layer's attention.

    Returns:
        Three [1, kv_heads · longest], fp32.
    """
    heads, block_size = k_cache.shape[1:3]
    scores, found, places = (k_cache.new_zeros((heads, longest), dtype=torch.float32) for _ in range(3))
    if len(compaction):
        this = Compaction.of(compaction, block_size)
        rows, before = this.rows, this.rows - len(this.queries)
        keys = stored_rows(k_cache, this, sketch.shape[0], cache_format).float()
        for new, old in ((found, attention), (places, positions)):
            new[:, :before] = old[this.blocks].transpose(0, 1).flatten(1)[:, :before]
        last = places[:, before - 1] if before else torch.full((heads,), -1.0)
        places[:, before:rows] = last[:, None] + 1 + torch.arange(rows - before)
        first = max(before, sinks)
        if first < rows:
            q = last_queries(q_first, q_second, this)[first - before :]
            found[:, first:rows] = chunk_attention(q, keys[first:], scale, softcap)
        if this.kept < rows:
            free = slice(sinks, rows - recent)
            values = stored_rows(v_cache, this, value_dim, cache_format)[free].float()
            plain = _turned_back(keys[free], places[:, free].T, inv_freq, interleaved, is_spread)
            share = 1 - this.kept / (float(places[0, rows - 1]) + 1)
            of_keys = leverage(plain.transpose(0, 1), sketch)
            scores[:, free] = blended(of_keys, found[:, free], values.norm(dim=-1).T, share)
    return scores.view(1, -1), found.view(1, -1), places.view(1, -1)


def _turned_back(
    keys: Tensor, positions: Tensor, inv_freq: Tensor | None, interleaved: bool, is_spread: bool
) -> Tensor:
    """Keys before their rotation. keys: [rows, heads, channels]; positions: [rows, heads]."""
    if is_spread:
        keys = rotated(keys)
    if inv_freq is None:
        return keys
    angles = -positions.reshape(-1, 1) * inv_freq.float()
    return rotate(keys.reshape(-1, 1, keys.shape[-1]), angles.cos(), angles.sin(), interleaved).view(keys.shape)
