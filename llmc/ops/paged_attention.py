"""llmc::paged_attention over a batch of cached sequences."""

from typing import Any

import torch
from torch import Tensor

from llmc.formats.cache_format import parts_of_pair
from llmc.ops.attention import attend, attention_flops
from llmc.ops.cache_codes import read_codes
from llmc.ops.registry import FROM_SERVING, op


def _attended(a: Any) -> Any:
    return a.q.new_empty((a.q.shape[0], a.q.shape[1], a.value_dim or a.v_cache.shape[3]))


@op(fake=_attended, stages=FROM_SERVING, flops=attention_flops)
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
    slopes: Tensor | None = None,
    chunk: int | None = None,
    latent: bool = False,
    bias: Tensor | None = None,
    chosen: Tensor | None = None,
    pinned: int | None = None,
    recent_k: Tensor | None = None,
    recent_v: Tensor | None = None,
    recent_tables: Tensor | None = None,
    recent: int | None = None,
    recent_lens: Tensor | None = None,
) -> Tensor:
    """Causal attention of a ragged batch over the paged cache; prefill chunks and decodes mix freely.

    q: [tokens, heads, head_dim], the tokens of all requests concatenated; those of request r are
    query_starts[r]:query_starts[r + 1] and are the last of its context_lens[r] cached rows. Row p of request r is in
    block block_tables[r, p // block_size]. query_starts: [requests + 1], context_lens: [requests], block_tables:
    [requests, max_blocks], all int32. Caches as in kv_write. Returns [tokens, heads, value_dim]. cache_format,
    value_dim: for caches that hold codes (cache_codes.py), whose shape does not show them.
    tree_masks: [tokens], int64; bit d hides the row d before the token's own. The token attends to the remaining rows
    as if there were no others. None hides nothing.
    recent_k, recent_v, recent_tables: caches of numbers, and the blocks of each request in them. A token reads the last
    `recent` of the rows that its mask shows from these caches, and the rows before from k_cache and v_cache. None: it
    reads all rows from k_cache and v_cache. recent_lens: [requests], int32, rows of each request in these caches, where
    they are not context_lens. The last rows are those of the same tokens as in k_cache and v_cache.
    """
    out = q.new_empty((q.shape[0], q.shape[1], value_dim or v_cache.shape[3]))
    key_dim = q.shape[2] - (out.shape[2] if latent else 0)
    formats = parts_of_pair(cache_format)
    masks = [0] * q.shape[0] if tree_masks is None else tree_masks.tolist()
    for r, length in enumerate(context_lens.tolist()):
        start, end = int(query_starts[r]), int(query_starts[r + 1])
        k, v = (
            _rows(cache, block_tables[r], length, channels, format)
            for cache, channels, format in ((k_cache, key_dim, formats[0]), (v_cache, out.shape[2], formats[1]))
        )
        near: list[Tensor] = []
        if recent is not None:
            assert recent_k is not None and recent_v is not None and recent_tables is not None
            kept = length if recent_lens is None else int(recent_lens[r])
            near = [_rows(cache, recent_tables[r], kept, cache.shape[3]) for cache in (recent_k, recent_v)]
        spans: list[tuple[int, int, list[int]]] = [(start, end, list(range(length)))]
        if near or any(masks[start:end]):
            spans = [(i, i + 1, visible_rows(length - (end - i), masks[i])) for i in range(start, end)]
        for first, last, rows in spans:
            own, place = slice(first, last), len(rows) - (last - first)
            sink = sinks[own] if sinks is not None and sinks.dim() == 2 else sinks
            added, seen = (None if tensor is None else tensor[own] for tensor in (bias, chosen))
            options = scale, window, softcap, sink, slopes, chunk, latent, added, seen, pinned
            keys, values = k[rows], v[rows]
            if recent is not None:
                keys, values = (
                    torch.cat((old[:-recent], new[[row + len(new) - length for row in rows[-recent:]]]))
                    for old, new in zip((keys, values), near, strict=True)
                )
            out[own] = attend(q[own], keys, values, place, *options).to(q.dtype)
    return out


def visible_rows(own: int, mask: int) -> list[int]:
    """The rows that a token in row `own` sees, by its mask."""
    return [row for row in range(own + 1) if not (own - row < 64 and mask >> (own - row) & 1)]


def _rows(cache: Tensor, table: Tensor, length: int, channels: int, cache_format: str | None = None) -> Tensor:
    """The first rows of a request, [length, kv_heads, channels]."""
    blocks = cache[table[: -(-length // cache.shape[2])].long()]
    numbers = blocks if cache_format is None else read_codes(blocks, channels, cache_format)
    return numbers.transpose(1, 2).flatten(0, 1)[:length]
