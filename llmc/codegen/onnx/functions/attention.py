"""llmc::attention over a sequence, and what serving makes of it: kv_write, rope_kv_write and paged_attention.

Caches are values: an op that writes to a cache returns a new one, and the graph returns the last. A session whose input
and output are bound to the same memory writes in place. Caches that hold codes have no function: see function_table.py.
"""

from typing import Any

import numpy as np
import torch

from llmc.codegen.onnx.function_body import END, Body, NotInOnnx, Operand, Value
from llmc.codegen.onnx.functions.requests import padded, places
from llmc.codegen.onnx.functions.rows import rope

llmc = torch.ops.llmc


def attention(
    b: Body,
    q: Value,
    k: Value,
    v: Value,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Value | None,
    latent: bool,
) -> str:
    """Attention of all tokens over all tokens, one batch."""
    heads, kv_heads = q.size(1), k.size(1)
    tokens = b.squeeze(b.length(q, 0), 0)
    rows = b.unsqueeze(b("Range", b.integer(0), tokens, b.integer(1)), 0)
    visible = _visible(b, b.unsqueeze(rows, 2), b.unsqueeze(rows, 1), window)
    queries = b.unsqueeze(b.transpose(b.reshape(q, -1, kv_heads, heads // kv_heads, q.size(2)), 1, 2, 0, 3), 0)
    keys, values = (b.unsqueeze(b.transpose(tensor, 1, 0, 2), 0) for tensor in (k, v))
    keys = b("Concat", keys, values, axis=3) if latent else keys
    out = _attend(b, queries, keys, values, visible, heads // kv_heads, q.size(2), scale, softcap, sinks)
    return b.reshape(b.transpose(b.squeeze(out, 0), 2, 0, 1, 3), -1, heads, v.size(2))


def _visible(b: Body, own: Operand, keys: Operand, window: int | None) -> str:
    """Return which keys' rows a query in row `own` sees, bool."""
    visible = b("LessOrEqual", keys, own)
    if window is None:
        return visible
    return b("And", visible, b("Greater", keys, b("Sub", own, b.integer(window))))


def _attend(
    b: Body,
    queries: str,
    keys: str,
    values: str,
    visible: str,
    group: int,
    head_dim: int,
    scale: float,
    softcap: float | None,
    sinks: Value | None,
) -> str:
    """queries: [batch, kv_heads, group, rows, head_dim]; keys, values: [batch, kv_heads, keys, …]; visible: [batch,
    rows, keys]. One product per KV head: the rows of its query heads are stacked."""
    as_rows = b("Reshape", queries, b.integers([0, 0, -1, head_dim]))
    scores = b("MatMul", as_rows, b.transpose(keys, 0, 1, 3, 2))
    scores = b("Mul", scores, b.number(scale))
    if softcap is not None:
        scores = b("Mul", b("Tanh", b("Div", scores, b.number(softcap))), b.number(softcap))
    # [batch, kv_heads, group, rows, keys]
    shape = b("Concat", b.length(queries, 0), b.integers([0, group, -1]), b.length(keys, 2), axis=0)
    scores = b("Where", b.unsqueeze(visible, 1, 2), b("Reshape", scores, shape), b.number(-np.inf))
    largest = b("ReduceMax", scores, b.integers([-1]), keepdims=1)
    if sinks is not None and len(sinks.shape) != 1:
        raise NotInOnnx("each token has its own sinks")
    logits = None if sinks is None else b.reshape(sinks, 1, -1, group, 1, 1)
    largest = largest if logits is None else b("Max", largest, logits)
    flat = b("Concat", b.length(queries, 0), b.integers([0, -1]), b.length(keys, 2), axis=0)
    weights = b("Reshape", b("Exp", b("Sub", scores, largest)), flat)
    # The sum of weights is one more channel: also summed in the order of keys, it has the same bits for any zero
    # weights between or after them.
    ones = b("Expand", b.number(1.0), b("Concat", b("Shape", values, end=3), b.integers([1]), axis=0))
    sums = b("MatMul", weights, b("Concat", values, ones, axis=3))
    sums = b("Reshape", sums, b("Concat", b.length(queries, 0), b.integers([0, group, -1]), b.length(sums, 3), axis=0))
    total = b.slice(sums, 4, -1, END)
    if logits is not None:
        total = b("Add", total, b("Exp", b("Sub", logits, largest)))
    return b("Div", b.slice(sums, 4, 0, -1), total)


def kv_write(
    b: Body, k: Value, v: Value, k_cache: Value, v_cache: Value, slot_mapping: Value, cache_format: str | None
) -> tuple[str, str]:
    """Return both caches with this step's tokens in them."""
    _check_plain(cache_format)
    return _written(b, k, k_cache, slot_mapping), _written(b, v, v_cache, slot_mapping)


def rope_kv_write(
    b: Body,
    q: Value,
    k: Value,
    v: Value,
    cos: Value,
    sin: Value,
    k_cache: Value,
    v_cache: Value,
    slot_mapping: Value,
    interleaved: bool,
    cache_format: str | None,
) -> tuple[str, str, str]:
    """q rotated, and both caches with k rotated and v in them."""
    _check_plain(cache_format)
    turned = Value(rope(b, k, cos, sin, interleaved), k.fake)
    caches = _written(b, turned, k_cache, slot_mapping), _written(b, v, v_cache, slot_mapping)
    return rope(b, q, cos, sin, interleaved), *caches


def _check_plain(cache_format: str | None) -> None:
    if cache_format is not None:
        raise NotInOnnx(f"a cache of {cache_format} codes, whose bytes no standard op takes apart")


def _written(b: Body, values: Value, cache: Value, slot_mapping: Value) -> str:
    """ScatterND of [tokens, kv_heads] rows to (block, head, place in the block)."""
    heads, block_size = cache.size(1), b.integer(cache.size(2))
    slots = b.cast(slot_mapping, torch.int64)
    shape = b("Concat", b.length(values, 0), b.integers([heads]), axis=0)
    blocks = b("Expand", b.unsqueeze(b("Div", slots, block_size), 1), shape)
    places = b("Expand", b.unsqueeze(b("Mod", slots, block_size), 1), shape)
    every_head = b("Expand", b.constant(np.arange(heads)[None]), shape)
    indices = b("Concat", *(b.unsqueeze(column, 2) for column in (blocks, every_head, places)), axis=2)
    return b("ScatterND", cache, indices, values)


def paged_attention(
    b: Body,
    q: Value,
    k_cache: Value,
    v_cache: Value,
    query_starts: Value,
    context_lens: Value,
    block_tables: Value,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Value | None,
    cache_format: str | None,
    value_dim: int | None,
    tree_masks: Value | None,
    latent: bool,
) -> str:
    """Requests in a batch, padded to the maximum number of queries; missing rows repeat the request's last row."""
    _check_plain(cache_format)
    heads, kv_heads = q.size(1), k_cache.size(1)
    # Some libraries use a different product for a single row, with different bits.
    starts, counts, rows = padded(b, query_starts, least=2)
    lengths = b.unsqueeze(b.cast(context_lens, torch.int64), 1)
    own = b.unsqueeze(b("Add", b("Sub", lengths, counts), rows), 2)
    index = b("Add", starts, rows)
    key_rows = _key_rows(b, block_tables, k_cache.size(2))
    visible = _visible(b, own, key_rows, window if tree_masks is None else None)
    if tree_masks is not None:
        visible = _unhidden(b, visible, b("Gather", tree_masks, index, axis=0), own, key_rows, window)
    queries = b("Gather", q, index, axis=0)
    split = b("Reshape", queries, b.integers([0, 0, kv_heads, heads // kv_heads, q.size(2)]))
    tables = b.cast(block_tables, torch.int64)
    keys, values = (_cached(b, cache, tables) for cache in (k_cache, v_cache))
    # Values outside of the request's rows are not used, but zero times a value that is not finite would be.
    row = b("Squeeze", key_rows, b.integers([1]))
    is_row = b("Less", row, lengths)
    if window is not None:
        # Blocks behind the window may be another request's by now.
        is_row = b("And", is_row, b("Greater", row, b("Sub", b("Sub", lengths, counts), b.integer(window))))
    values = b("Where", b.unsqueeze(is_row, 1, 3), values, b.number(0.0))
    queries = b.transpose(split, 0, 2, 3, 1, 4)
    keys = b("Concat", keys, values, axis=3) if latent else keys
    out = _attend(b, queries, keys, values, visible, heads // kv_heads, q.size(2), scale, softcap, sinks)
    in_order = b.reshape(b.transpose(out, 0, 3, 1, 2, 4), -1, heads, v_cache.size(3))
    return b("Gather", in_order, places(b, q, query_starts, starts, rows), axis=0)


def _key_rows(b: Body, block_tables: Value, block_size: int) -> str:
    """The rows of the cache that tables of blocks reach, [1, 1, rows]."""
    count = b("Mul", b.squeeze(b.length(block_tables, 1), 0), b.integer(block_size))
    return b.unsqueeze(b("Range", b.integer(0), count, b.integer(1)), 0, 1)


def _cached(b: Body, cache: Value, tables: str) -> str:
    """Return each request's rows, [requests, kv_heads, rows, channels]."""
    blocks = b.transpose(b("Gather", cache, tables, axis=0), 0, 2, 1, 3, 4)
    return b("Reshape", blocks, b.integers([0, 0, -1, cache.size(3)]))


def _unhidden(b: Body, visible: str, masks: str, own: str, key_rows: str, window: int | None) -> str:
    """Remove the rows that a token's mask hides from the visible ones; bit d is the row d before its own. A window
    counts the remaining rows."""
    distance = b("Sub", own, key_rows)
    within = b("Cast", b("Clip", distance, b.integer(0), b.integer(63)), to=_UINT64)
    bits = b("BitShift", b("Cast", b.unsqueeze(masks, 2), to=_UINT64), within, direction="RIGHT")
    is_set = b("Cast", b("BitwiseAnd", bits, b.constant(np.array(1, np.uint64))), to=_BOOL)
    hidden = b("And", is_set, b("Less", distance, b.integer(64)))
    left = b("And", visible, b("Not", hidden))
    if window is None:
        return left
    from_here = b("CumSum", b("Cast", left, to=_INT64), b.integer(2), reverse=1)
    return b("And", left, b("LessOrEqual", from_here, b.integer(window)))


_BOOL, _INT64, _UINT64 = 9, 7, 13

FUNCTIONS: dict[Any, Any] = {
    llmc.attention.default: attention,
    llmc.kv_write.default: kv_write,
    llmc.rope_kv_write.default: rope_kv_write,
    llmc.paged_attention.default: paged_attention,
}
