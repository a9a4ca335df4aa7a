"""llmc::sum_attention and llmc::keep_sums — the attention that all queries until now have paid to a request's rows.

Source: Zhang et al. 2023, "H2O: Heavy-Hitter Oracle for efficient generative inference of large language models".
"""

import torch
from torch import Tensor

from llmc.ops.compact_kv import Compaction, best_rows
from llmc.ops.registry import FROM_SERVING, op, per_element
from llmc.ops.score_keys import causal_attention, last_queries, stored_rows


@op(
    fake=lambda a: a.k_cache.new_empty((1, a.k_cache.shape[1] * a.longest), dtype=torch.float32),
    stages=FROM_SERVING,
    flops=per_element(0),
)
def sum_attention(
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
    """The sums of a request's rows with the attention of its last queries: [1, kv_heads · longest], fp32.

    q_first, q_second, k_cache, longest: the arguments of score_keys. sums: [blocks, kv_heads, block_size, 1], fp32, of
    the rows before the queries'; the rows of the queries have none yet. Query heads of one KV head are averaged.
    """
    heads, block_size = k_cache.shape[1:3]
    scores = k_cache.new_zeros((heads, longest), dtype=torch.float32)
    if len(compaction):
        sequence = Compaction.of(compaction, block_size)
        q = last_queries(q_first, q_second, sequence)
        attention = causal_attention(q, stored_rows(k_cache, sequence, q.shape[2], cache_format), scale, softcap)
        scores[:, : sequence.rows] = attention.sum(1).view(heads, -1, sequence.rows).mean(1)
        before = sequence.rows - len(sequence.queries)
        scores[:, :before] += sums[sequence.blocks].transpose(0, 1).flatten(1)[:, :before]
    return scores.view(1, -1)


@op(fake=lambda a: None, stages=FROM_SERVING, flops=per_element(0), writes=("sums",))
def keep_sums(
    sums: Tensor, scores: Tensor, compaction: Tensor, kept_first: int, kept_last: int, numbers: Tensor | None = None
) -> None:
    """Write numbers of the rows that compact_kv keeps to where it moves them.

    sums: the sums of sum_attention. kept_first, kept_last: sinks and recent of compact_kv. numbers: the numbers of the
    rows, in the form of scores; the scores themselves unless given.
    """
    if not len(compaction):
        return
    heads, block_size = sums.shape[1:3]
    sequence = Compaction.of(compaction, block_size)
    best = best_rows(scores.view(heads, -1), sequence.rows, sequence.kept, kept_first, kept_last)
    of_heads = (scores if numbers is None else numbers).view(heads, -1)
    to = torch.arange(sequence.kept)
    sums[sequence.places[to // block_size], :, to % block_size, 0] = of_heads.gather(1, best).T
