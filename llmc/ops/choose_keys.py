"""llmc::choose_keys, llmc::paged_choose_keys — which keys an attention's queries see, where an indexer says so.

    score[t, s] = Σ_h weights[t, h] · max(0, q[t, h]·k[s]),   chosen[t] = the places of the largest scores

Source: DeepSeek-AI 2025, "DeepSeek-V3.2" (DSA).
"""

from typing import Any

import sympy
import torch
from torch import Tensor

from llmc.graph.op_record import A, OpCall
from llmc.ops.paged_attention import visible_rows
from llmc.ops.registry import FROM_SERVING, WHOLE_SEQUENCE, op

# Fills the rest of a query's places where it sees fewer keys than may be chosen.
NO_PLACE = 2**31 - 1


def choose(q: Tensor, k: Tensor, weights: Tensor, first_place: int, count: int) -> Tensor:
    """Return for queries in places first_place… the places of the `count` visible keys with the highest scores, in
    order of place; ties go to the first. q: [queries, heads, channels]; k: [keys, channels]; weights: [queries, heads].
    Returns [queries, count], int32, NO_PLACE for missing keys."""
    by_head = torch.einsum("qhd,kd->qhk", q.float(), k.float()).relu()
    scores = torch.einsum("qh,qhk->qk", weights.float(), by_head)
    places = torch.arange(k.shape[0], device=q.device)
    is_behind = places[None, :] > first_place + torch.arange(q.shape[0], device=q.device)[:, None]
    order = scores.masked_fill(is_behind, float("-inf")).sort(dim=-1, descending=True, stable=True).indices[:, :count]
    seen = order.masked_fill(is_behind.gather(1, order), NO_PLACE).sort(dim=-1).values
    padding = seen.new_full((q.shape[0], count - seen.shape[1]), NO_PLACE)
    return torch.cat((seen, padding), dim=1).int()


def _chosen(a: Any) -> Tensor:
    chosen: Tensor = a.q.new_empty((a.q.shape[0], a.count), dtype=torch.int32)
    return chosen


def _flops(call: OpCall) -> sympy.Expr:
    _, heads, channels = call.sizes("q")
    return 2 * heads * (channels + 1) * A


def _check(call: OpCall) -> str | None:
    q, weights = call.shape("q"), call.shape("weights")
    fits = len(q) == 3 and len(weights) == 2 and weights[1] == q[1]
    return None if fits else f"q {q} and weights {weights} are not [tokens, heads, channels] and [tokens, heads]"


@op(fake=_chosen, stages=WHOLE_SEQUENCE, flops=_flops, check=_check)
def choose_keys(q: Tensor, k: Tensor, weights: Tensor, count: int) -> Tensor:
    """The keys that each token of one sequence sees: [tokens, count] as `choose` says. q: [tokens, heads, channels]; k:
    [tokens, channels]; weights: [tokens, heads]."""
    return choose(q, k, weights, 0, count)


@op(fake=_chosen, stages=FROM_SERVING, flops=_flops, check=_check)
def paged_choose_keys(
    q: Tensor,
    weights: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    count: int,
    tree_masks: Tensor | None = None,
) -> Tensor:
    """`choose_keys` of a ragged batch, whose arguments are as in paged_attention. A key is its row of k_cache followed
    by its row of v_cache; both caches have one head."""
    out = q.new_empty((q.shape[0], count), dtype=torch.int32)
    masks = [0] * q.shape[0] if tree_masks is None else tree_masks.tolist()
    for r, length in enumerate(context_lens.tolist()):
        start, end = int(query_starts[r]), int(query_starts[r + 1])
        blocks = block_tables[r, : -(-length // k_cache.shape[2])].long()
        k = torch.cat([cache[blocks, 0].flatten(0, 1) for cache in (k_cache, v_cache)], dim=-1)
        for i in range(start, end):
            rows = visible_rows(length - (end - i), masks[i])
            out[i] = choose(q[i : i + 1], k[rows], weights[i : i + 1], len(rows) - 1, count)
    return out
