"""Device code for the attention of a request's last queries: a tile of queries, and its logits with a tile of keys.

A row of a tile is a pair (query, query head of the KV head). Logits are in units of log2, -inf for a key that the query
does not see. A query sees the keys up to its own; or, with SINKS, all keys of the queries' rows except the first SINKS
rows, whose queries see none. SINKS is -1 for queries that see what is behind them.
"""

import triton
import triton.language as tl

from llmc.codegen.triton.kernels.attention.attend_keys import LOG2E
from llmc.codegen.triton.kernels.attention.cache_codes import read_codes
from llmc.codegen.triton.kernels.compaction.compaction_numbers import block_of, slot_of
from llmc.codegen.triton.kernels.interpreted import INTERPRETED


@triton.jit
def first_seen(compaction_ptr: tl.tensor, SINKS: tl.constexpr) -> tl.tensor:
    """The first row that a query sees."""
    if SINKS < 0:
        return tl.full([], 0, tl.int32)
    return tl.maximum(tl.load(compaction_ptr) - tl.load(compaction_ptr + 2), SINKS)


@triton.jit
def pair_queries(
    q_first_ptr: tl.tensor,
    q_second_ptr: tl.tensor,
    compaction_ptr: tl.tensor,
    pair: tl.tensor,
    kv_head: tl.tensor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DIM_TILE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The queries of pairs, [pairs, DIM_TILE], zero for absent ones, and the rows of their own keys (-1 for absent)."""
    HALF: tl.constexpr = HEAD_DIM // 2
    queries = tl.load(compaction_ptr + 2)
    query = pair // GROUP
    present = query < queries
    slot = slot_of(compaction_ptr, query, present, BLOCK_SIZE)
    channel = tl.arange(0, DIM_TILE)
    half = 2 * (kv_head * GROUP + pair % GROUP)[:, None] + (channel // HALF)[None, :]
    of_head = (slot // BLOCK_SIZE * HEADS)[:, None] + half % HEADS
    place = (of_head * BLOCK_SIZE + (slot % BLOCK_SIZE)[:, None]) * HALF + (channel % HALF)[None, :]
    inside = present[:, None] & (channel < HEAD_DIM)[None, :]
    is_first = half < HEADS
    first = tl.load(q_first_ptr + place, mask=inside & is_first, other=0.0)
    second = tl.load(q_second_ptr + place, mask=inside & (half >= HEADS), other=0.0)
    q = tl.where(is_first, first, second)
    if INTERPRETED:
        q = q.to(tl.float32)
    own_rows = tl.load(compaction_ptr) - queries + query
    return q, tl.where(present, own_rows, -1)


@triton.jit
def key_logits(
    q: tl.tensor,
    own_rows: tl.tensor,
    rows: tl.tensor,
    k_cache_ptr: tl.tensor,
    compaction_ptr: tl.tensor,
    kv_head: tl.tensor,
    scale: float,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    CACHE_FORMAT: tl.constexpr,
    CACHE_GROUP: tl.constexpr,
    SINKS: tl.constexpr,
) -> tl.tensor:
    """Logits of pairs with the keys of `rows`, [pairs, rows]. q, own_rows: as pair_queries returns them."""
    DIM_TILE: tl.constexpr = q.shape[1]
    present = rows < tl.load(compaction_ptr)
    block_and_head = block_of(compaction_ptr, rows, present, BLOCK_SIZE) * KV_HEADS + kv_head
    if CACHE_FORMAT == "none":
        channel = tl.arange(0, DIM_TILE)
        slots = block_and_head * BLOCK_SIZE + rows % BLOCK_SIZE
        inside = present[:, None] & (channel < HEAD_DIM)[None, :]
        k = tl.load(k_cache_ptr + slots[:, None] * HEAD_DIM + channel[None, :], mask=inside, other=0.0)
    else:
        k = read_codes(
            k_cache_ptr, block_and_head, rows % BLOCK_SIZE, present,
            HEAD_DIM, BLOCK_SIZE, CACHE_FORMAT, CACHE_GROUP, DIM_TILE,
        )  # fmt: skip
    logits = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
    if SOFTCAP > 0:
        # tanh(x) = 1 - 2 / (1 + exp(2x)), right at both infinities.
        logits = 1.0 - 2.0 / (1.0 + tl.exp2(logits * (scale * (2.0 * LOG2E / SOFTCAP))))
    logits = logits * ((SOFTCAP if SOFTCAP > 0 else scale) * LOG2E)
    if SINKS < 0:
        seen = rows[None, :] <= own_rows[:, None]
    else:
        first = first_seen(compaction_ptr, SINKS)
        seen = (rows >= first)[None, :] & (own_rows >= first)[:, None]
    return tl.where(present[None, :] & seen, logits, float("-inf"))
