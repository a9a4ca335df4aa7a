"""llmc::last_uses — when the queries of a request last used each block of its rows."""

import torch
from torch import Tensor

from llmc.ops.compact_kv import Compaction
from llmc.ops.registry import FROM_SERVING, op, per_element
from llmc.ops.score_keys import causal_attention, last_queries, stored_rows

# The largest share of attention that is added to a number of updates.
_MOST = 0.999


def block_uses(attention: Tensor, uses: Tensor, new: int, block_size: int) -> Tensor:
    """The uses of all rows after one more update: [heads, rows].

    Args:
        attention: [heads, rows], that the queries of the update pay to each row; each head's sum is 1.
        uses: [heads, rows - new], as returned by the update before.
        new: Number of rows since that update. They count as used.
        block_size: Rows of a block, which divides the numbers of rows.
    """
    heads = attention.shape[0]
    shares = attention.view(heads, -1, block_size).sum(-1)
    count = shares.shape[1]
    before = torch.zeros(heads, count)
    before[:, : count - new // block_size] = uses[:, ::block_size]
    now = before.amax(-1, keepdim=True).floor() + 1
    used = shares >= 1 / count
    used[:, count - new // block_size :] = True
    return torch.where(used, now + shares.clamp(max=_MOST), before).repeat_interleave(block_size, dim=1)


@op(
    fake=lambda a: a.k_cache.new_empty((1, a.k_cache.shape[1] * a.longest), dtype=torch.float32),
    stages=FROM_SERVING,
    flops=per_element(0),
)
def last_uses(
    q_first: Tensor,
    q_second: Tensor,
    k_cache: Tensor,
    sums: Tensor,
    compaction: Tensor,
    scale: float,
    softcap: float | None,
    longest: int,
    cache_format: str | None = None,
) -> Tensor:
    """The number of the update in which each row's block was last used, plus its share of attention then.

    The arguments are those of sum_attention; sums holds these numbers. Returns [1, kv_heads · longest], fp32. Query
    heads of one KV head are averaged.
    """
    heads, block_size = k_cache.shape[1:3]
    result = k_cache.new_zeros((heads, longest), dtype=torch.float32)
    if len(compaction):
        sequence = Compaction.of(compaction, block_size)
        q = last_queries(q_first, q_second, sequence)
        attention = causal_attention(q, stored_rows(k_cache, sequence, q.shape[2], cache_format), scale, softcap)
        before = sequence.rows - len(q)
        uses = sums[sequence.blocks].transpose(0, 1).flatten(1)[:, :before]
        mean = attention.mean(1).view(heads, -1, sequence.rows).mean(1)
        result[:, : sequence.rows] = block_uses(mean, uses, len(q), block_size)
    return result.view(1, -1)
