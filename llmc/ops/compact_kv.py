"""llmc::compact_kv — keep the rows with the highest scores of a request's cache, separately for each KV head.

A compaction is int32 [length]: how many rows the request has, how many are kept, how many queries go with it, how many
tokens the model has read, how many first rows are pinned; then the blocks that hold its rows, the blocks that the kept
ones move to, and the slots of the queries, in order. A length of 0 is none.
"""

from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from llmc.graph.dtype_names import DTYPE_NAMES
from llmc.ops.registry import FROM_SERVING, op, per_element
from llmc.program import COMPACTION_HEADER
from llmc.program.program import CacheSlot
from llmc.program.slot_views import cache_views


@dataclass(frozen=True)
class Compaction:
    """The numbers of a compaction.

    Args:
        rows: Number of rows of the request.
        kept: Number of rows that are kept.
        tokens: Number of tokens of the request that the model has read: the position of the next one.
        pinned: Number of first rows that are kept whatever their scores, in addition to those of the policy.
        blocks: Blocks of the rows.
        places: Blocks that the kept rows move to.
        queries: Slots of the queries.
    """

    rows: int
    kept: int
    tokens: int
    pinned: int
    blocks: Tensor
    places: Tensor
    queries: Tensor

    @staticmethod
    def of(numbers: Tensor, block_size: int) -> "Compaction":
        """Read from int32 [length], not 0."""
        rows, kept, queries, tokens, pinned = numbers[:COMPACTION_HEADER].tolist()
        ends = accumulate((-(-rows // block_size), -(-kept // block_size), queries), initial=COMPACTION_HEADER)
        blocks, places, slots = (numbers[begin:end].long() for begin, end in pairwise(ends))
        return Compaction(rows, kept, tokens, pinned, blocks, places, slots)


def best_rows(scores: Tensor, rows: int, kept: int, sinks: int, recent: int) -> Tensor:
    """The rows that are kept, in order: [heads, kept]. Ties go to the first rows.

    scores: [heads, rows or more]. The first `sinks` and the last `recent` rows are kept whatever their scores.
    """
    found = scores[:, :rows].clone()
    found[:, :sinks] = float("inf")
    found[:, max(0, rows - recent) :] = float("inf")
    order = torch.sort(found, dim=-1, descending=True, stable=True).indices
    return order[:, :kept].sort(dim=-1).values


@op(fake=lambda a: None, stages=FROM_SERVING, flops=per_element(0), writes=("k_cache", "v_cache"))
def compact_kv(
    k_cache: Tensor,
    v_cache: Tensor,
    scores: Tensor,
    compaction: Tensor,
    head_dim: int,
    value_dim: int,
    sinks: int,
    recent: int,
    cache_format: str | None = None,
) -> None:
    """Move the rows with the highest scores of each head to the first rows of the compaction's places, in order.

    k_cache, v_cache: the caches, as for kv_write; rows are copied as they are stored. scores: [1, kv_heads · longest],
    fp32; the score of row r of head h is at h · longest + r. sinks, recent: numbers of first and last rows that are
    kept whatever their scores.
    """
    if not len(compaction):
        return
    heads, block_size = k_cache.shape[1:3]
    this = Compaction.of(compaction, block_size)
    best = best_rows(scores.view(heads, -1), this.rows, this.kept, sinks, recent)
    sources, to = this.blocks[best // block_size], this.places[torch.arange(this.kept) // block_size]
    row, own = best % block_size, torch.arange(this.kept) % block_size
    for cache, part in ((k_cache, "k"), (v_cache, "v")):
        slot = CacheSlot(heads, head_dim, value_dim, DTYPE_NAMES[cache.dtype], cache_format)
        for view in cache_views(slot, part, cache.view(torch.uint8), block_size):
            for head in range(heads):
                view[to, head, :, own] = view[sources[head], head, :, row[head]]
