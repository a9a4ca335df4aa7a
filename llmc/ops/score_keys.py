"""llmc::score_keys — how much attention a request's last queries pay to its keys.

Source: Li et al. 2024, "SnapKV: LLM knows what you are looking for before generation".
"""

import torch
from torch import Tensor

from llmc.ops.cache_codes import read_codes
from llmc.ops.compact_kv import Compaction
from llmc.ops.registry import FROM_SERVING, op, per_element


def window_scores(q: Tensor, k: Tensor, scale: float, pool: int, softcap: float | None) -> Tensor:
    """Scores [kv_heads, keys - queries], fp32: the mean attention of the queries, averaged over `pool` neighbours.

    q: [queries, heads, head_dim], of the last positions; k: [keys, kv_heads, head_dim]. Each query sees the keys up to
    its own. Neighbours before the first key, or among the queries' own, count as 0. Query heads of one KV head are
    averaged.
    """
    attention = causal_attention(q, k, scale, softcap)[..., : k.shape[0] - q.shape[0]]
    mean = attention.mean(1).view(k.shape[1], q.shape[1] // k.shape[1], -1).mean(1)
    if not mean.shape[1]:
        return mean
    return torch.nn.functional.avg_pool1d(mean[:, None], pool, stride=1, padding=pool // 2)[:, 0]


def causal_attention(q: Tensor, k: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Probabilities [heads, queries, keys], fp32, of queries of the last positions. The arguments are those of
    window_scores."""
    queries, keys = len(q), len(k)
    own = torch.arange(keys - queries, keys)[:, None]
    logits = attention_logits(q, k, scale, softcap)
    return logits.masked_fill(torch.arange(keys) > own, float("-inf")).softmax(-1)


def attention_logits(q: Tensor, k: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Logits [heads, queries, keys], fp32, of all pairs. The arguments are those of window_scores."""
    group = q.shape[1] // k.shape[1]
    logits = torch.einsum("qhd,khd->hqk", q.float(), k.float().repeat_interleave(group, dim=1)) * scale
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def last_queries(q_first: Tensor, q_second: Tensor, this: Compaction) -> Tensor:
    """The queries of a compaction, [queries, heads, head_dim]. q_first, q_second: the arguments of score_keys."""
    slots, block_size = this.queries, q_first.shape[2]
    halves = [cache[slots // block_size, :, slots % block_size] for cache in (q_first, q_second)]
    return torch.cat(halves, dim=1).flatten(1).view(len(slots), q_first.shape[1], -1)


def stored_rows(cache: Tensor, this: Compaction, channels: int, cache_format: str | None) -> Tensor:
    """The keys, or the values, of a compaction's rows: [rows, kv_heads, channels]."""
    blocks = cache[this.blocks]
    rows = blocks if cache_format is None else read_codes(blocks, channels, cache_format)
    return rows.transpose(1, 2).flatten(0, 1)[: this.rows]


@op(
    fake=lambda a: a.k_cache.new_empty((1, a.k_cache.shape[1] * a.longest), dtype=torch.float32),
    stages=FROM_SERVING,
    flops=per_element(0),
)
def score_keys(
    q_first: Tensor,
    q_second: Tensor,
    k_cache: Tensor,
    compaction: Tensor,
    scale: float,
    pool: int,
    softcap: float | None,
    longest: int,
    cache_format: str | None = None,
) -> Tensor:
    """The scores of a request's rows by its last queries (`window_scores`): [1, kv_heads · longest], fp32.

    q_first, q_second: caches of queries, [blocks, heads, block_size, head_dim / 2]: half i of all heads' halves, in
    order, is head i of the first, or of the second. k_cache: the keys' cache, as for kv_write. compaction: the
    compaction, as for compact_kv. longest: rows of the longest sequence. Rows under the queries, and those after the
    request's, score 0.
    """
    heads, block_size = k_cache.shape[1:3]
    found = k_cache.new_zeros((heads, longest), dtype=torch.float32)
    if len(compaction):
        this = Compaction.of(compaction, block_size)
        q = last_queries(q_first, q_second, this)
        scores = window_scores(q, stored_rows(k_cache, this, q.shape[2], cache_format), scale, pool, softcap)
        found[:, : scores.shape[1]] = scores
    return found.view(1, -1)
