"""llmc::attention over one whole sequence, and llmc::paged_attention over a batch of cached ones.

Source of the softmax with sinks: Xiao et al. 2023 in the learned form of gpt-oss; of softcap: Gemma 2.
"""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch import Tensor

from llmc.graph.op_record import A, OpCall
from llmc.ops.cache_codes import read_codes
from llmc.ops.registry import FROM_SERVING, WHOLE_SEQUENCE, op


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first_position: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Causal attention in fp32 of queries at positions first_position…, over keys from position 0.

    q: [queries, heads, head_dim]; k, v: [keys, kv_heads, head_dim].

    Query head h reads KV head h // (heads / kv_heads). window: a query sees the last `window` positions, itself
    included. softcap: scores become softcap·tanh(score / softcap). sinks: [heads], one extra logit a head that
    takes probability and adds nothing. Returns [queries, heads, value_dim], fp32.
    """
    group = q.shape[1] // k.shape[1]
    keys = k.float().repeat_interleave(group, dim=1)
    values = v.float().repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    query_positions = first_position + torch.arange(q.shape[0], device=q.device)[:, None]
    key_positions = torch.arange(k.shape[0], device=q.device)[None, :]
    visible = key_positions <= query_positions
    if window is not None:
        visible = visible & (key_positions > query_positions - window)
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        sink = sinks.float()[:, None, None].expand(-1, q.shape[0], 1)
        probabilities = torch.cat((scores, sink), dim=-1).softmax(-1)[..., :-1]
    else:
        probabilities = scores.softmax(-1)
    return torch.einsum("hqk,khd->qhd", probabilities, values)


def _heads_fit(call: OpCall) -> str | None:
    q, k, v = call.shape("q"), call.shape("k"), call.shape("v")
    if not len(q) == len(k) == len(v) == 3:
        return f"attention needs [tokens, heads, head_dim], got q {q}, k {k}, v {v}"
    if q[1] % k[1] != 0 or k[1] != v[1] or q[2] != k[2]:
        return f"the heads do not fit: q {q}, k {k}, v {v}"
    return None


def _attended_whole(a: Any) -> Any:
    return a.q.new_empty((a.q.shape[0], a.q.shape[1], a.v.shape[2]))


def _attended(a: Any) -> Any:
    return a.q.new_empty((a.q.shape[0], a.q.shape[1], a.value_dim or a.v_cache.shape[3]))


def _flops(call: OpCall) -> sympy.Expr:
    """Of scores and weighted sums, over all pairs of a query and a key that it sees."""
    tokens, heads, head_dim = call.sizes("q")
    window, value_dim = call.arguments["window"], call.size(call.result.shape[2])
    return 2 * heads * (head_dim + value_dim) * (A if window is None else sympy.Min(A, window * tokens))


@op(
    fake=_attended_whole,
    stages=WHOLE_SEQUENCE,
    flops=_flops,
    check=_heads_fit,
    fallback="paged_attention",
    axes="q[t g*h d!] k[t g d!] v[t g e!] sinks[g*h] -> [t g*h e!]",
)
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal self-attention of one sequence. q: [tokens, heads, head_dim]; k, v: [tokens, kv_heads, head_dim].

    Options as in `attend`; returns [tokens, heads, value_dim] in q's dtype.
    """
    return attend(q, k, v, 0, scale, window, softcap, sinks).to(q.dtype).contiguous()


@op(fake=_attended, stages=FROM_SERVING, flops=_flops)
def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    cache_format: str | None = None,
    value_dim: int | None = None,
    tree_masks: Tensor | None = None,
) -> Tensor:
    """Causal attention of a ragged batch over the paged cache; prefill chunks and decodes mix freely.

    q: [tokens, heads, head_dim], the requests' tokens one after the other; those of request r are
    query_starts[r]:query_starts[r + 1], and stand in the last of its context_lens[r] cached rows; its row p lies in
    block block_tables[r, p // block_size]. query_starts: [requests + 1], context_lens: [requests], block_tables:
    [requests, max_blocks], all int32. Caches as in kv_write. Returns [tokens, heads, value_dim].
    cache_format, value_dim: of caches that hold codes (cache_codes.py), which their shape does not show.
    tree_masks: [tokens], int64; bit d says that the row d before a token's own is hidden from it. It then attends to
    the rows that are left as if no others were there. None hides nothing.
    """
    out = q.new_empty((q.shape[0], q.shape[1], value_dim or v_cache.shape[3]))
    block_size = k_cache.shape[2]
    masks = [0] * q.shape[0] if tree_masks is None else tree_masks.tolist()
    for r, length in enumerate(context_lens.tolist()):
        start, end = int(query_starts[r]), int(query_starts[r + 1])
        blocks = block_tables[r, : -(-length // block_size)].long()
        k, v = (
            _cached(cache[blocks], channels, cache_format).transpose(1, 2).flatten(0, 1)[:length]
            for cache, channels in ((k_cache, q.shape[2]), (v_cache, out.shape[2]))
        )
        options = scale, window, softcap, sinks
        if not any(masks[start:end]):
            out[start:end] = attend(q[start:end], k, v, length - (end - start), *options).to(q.dtype)
            continue
        for i in range(start, end):
            rows = visible_rows(length - (end - i), masks[i])
            out[i : i + 1] = attend(q[i : i + 1], k[rows], v[rows], len(rows) - 1, *options).to(q.dtype)
    return out


def visible_rows(own: int, mask: int) -> list[int]:
    """The rows that a token in row `own` sees, by its mask."""
    return [row for row in range(own + 1) if not (own - row < 64 and mask >> (own - row) & 1)]


def _cached(blocks: Tensor, channels: int, cache_format: str | None) -> Tensor:
    return blocks if cache_format is None else read_codes(blocks, channels, cache_format)
