"""llmc::peak_attention — the largest attention that a query of a second reading has paid to each of a request's rows.

Source: Kim et al. 2025, "KVzip: Query-agnostic KV cache compression with context reconstruction".
"""

import torch
from torch import Tensor

from llmc.ops.compact_kv import Compaction
from llmc.ops.registry import FROM_SERVING, op, per_element
from llmc.ops.score_keys import causal_attention, last_queries, stored_rows

# The score of a row that is never kept.
NEVER = -1.0


@op(
    fake=lambda a: a.k_cache.new_empty((1, a.k_cache.shape[1] * a.longest), dtype=torch.float32),
    stages=FROM_SERVING,
    flops=per_element(0),
)
def peak_attention(
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
    """The largest attention to each of a request's rows, with that of its last queries: [1, kv_heads · longest], fp32.

    The arguments are those of sum_attention; sums holds these maxima. Only the first `tokens` rows of the compaction
    are the request's own. The rows after them are those of tokens that are read again; they score NEVER. A compaction
    without queries comes before the reading: all rows of the request start at 0. The maximum is over all query heads of
    a KV head.
    """
    heads, block_size = k_cache.shape[1:3]
    found = k_cache.new_zeros((heads, longest), dtype=torch.float32)
    if len(compaction):
        this = Compaction.of(compaction, block_size)
        found[:, this.tokens : this.rows] = NEVER
        if len(this.queries):
            q = last_queries(q_first, q_second, this)
            attention = causal_attention(q, stored_rows(k_cache, this, q.shape[2], cache_format), scale, softcap)
            peaks = attention.amax(1).view(heads, -1, this.rows).amax(1)
            before = sums[this.blocks].transpose(0, 1).flatten(1)
            found[:, : this.tokens] = torch.maximum(peaks, before[:, : this.rows])[:, : this.tokens]
    return found.view(1, -1)
