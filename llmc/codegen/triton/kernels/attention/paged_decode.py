"""Paged attention of the requests that bring one token: split over the keys, then joined by the split that ends last.

    y[r, h] = Σ_s exp(m[s] - m) Σ_{j in split s} exp(s[j] - m[s]) v[j] / Σ_s exp(m[s] - m) l[s],   m = max_s m[s]

Source: Dao, Haziza, Massa and Sizov 2023, "Flash-Decoding for long-context inference".
"""

import triton
import triton.language as tl

from llmc.codegen.triton.kernels.agreed_sums import sum_of_products
from llmc.codegen.triton.kernels.attention.attend_keys import (
    LOG2E,
    LOWEST,
    attend_keys,
    first_seen,
    read_queries,
    rows_ahead,
)
from llmc.codegen.triton.kernels.attention.kv_write import slot_rows
from llmc.codegen.triton.kernels.interpreted import INTERPRETED
from llmc.codegen.triton.kernels.last_program import is_last
from llmc.codegen.triton.kernels.rows.rope import turned
from llmc.codegen.triton.machine_code.budget import READ_ONCE, Budget, Limit

# Heads whose splits are read at the same time, so that they wait for the L2 cache together.
_JOINED_TOGETHER = tl.constexpr(4)


@triton.jit
def paged_decode_kernel(
    q_ptr: tl.tensor,
    k_cache_ptr: tl.tensor,
    v_cache_ptr: tl.tensor,
    query_starts_ptr: tl.tensor,
    context_lens_ptr: tl.tensor,
    block_tables_ptr: tl.tensor,
    recent_k_ptr: tl.tensor,
    recent_v_ptr: tl.tensor,
    recent_tables_ptr: tl.tensor,
    recent_lens_ptr: tl.tensor,
    slopes_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    partials_ptr: tl.tensor,
    arrivals_ptr: tl.tensor,
    k_ptr: tl.tensor,
    k_row_stride: int,
    v_ptr: tl.tensor,
    v_row_stride: int,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    slot_mapping_ptr: tl.tensor,
    y_ptr: tl.tensor,
    q_row_stride: int,
    y_row_stride: int,
    max_blocks: int,
    scale: float,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SHARES: tl.constexpr,
    LATENT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    PINNED: tl.constexpr,
    RECENT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    DIM_TILE: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    CACHE_FORMAT: tl.constexpr,
    CACHE_GROUP: tl.constexpr,
    VALUE_FORMAT: tl.constexpr,
    VALUE_GROUP: tl.constexpr,
    ROW_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
) -> None:
    """Program (s, g, r): split s of request r's keys, for GROUP query heads from head g·GROUP on, as rows.

    Grid: (SPLITS, KV_HEADS · SHARES, R): SHARES programs have the query heads that read one KV head. Keys and values
    are read once, by position, those before PINNED by the first split; a split without keys ends at once. The newest
    RECENT keys are read from recent_k and recent_v, all others from k_cache and v_cache. Each leaves (Σ exp·v, maximum,
    Σ exp) in partials: [R, heads, SPLITS, VALUE_TILE + 4], fp32, and the last one of a request's share joins them.

    With k, the launch does the work of rope_kv_write too: queries are turned as they are read, and the programs whose
    split ends with the token's own key write its key and value before they read them.
    """
    split, share, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv_head = share // SHARES
    row = tl.load(query_starts_ptr + request)
    if tl.load(query_starts_ptr + request + 1) - row != 1:
        return
    context = tl.load(context_lens_ptr + request)
    first_key, split_keys = split_of(context, WINDOW, CHUNK, SPLITS, MIN_SPLIT, KEY_TILE)
    start = first_key + split * split_keys
    end = tl.minimum(start + split_keys, context)
    if start >= end:
        return

    rows = tl.arange(0, ROW_TILE)
    present = rows < GROUP
    head = share * GROUP + rows
    value_dims = tl.arange(0, VALUE_TILE)
    q_rows = q_ptr + row.to(tl.int64) * q_row_stride + head * (HEAD_DIM + VALUE_DIM if LATENT else HEAD_DIM)
    if k_ptr is None:
        q = read_queries(q_rows, present, HEAD_DIM, DIM_TILE)
    else:
        q = turned(q_rows[:, None], present[:, None], row, cos_ptr, sin_ptr, HEAD_DIM, DIM_TILE, HALF, INTERLEAVED)
        q = q.to(q_ptr.dtype.element_ty)
        if INTERPRETED:
            q = q.to(tl.float32)
        if end == context:
            write_own_key(
                k_ptr + row.to(tl.int64) * k_row_stride, v_ptr + row.to(tl.int64) * v_row_stride, cos_ptr, sin_ptr,
                k_cache_ptr, v_cache_ptr, tl.load(slot_mapping_ptr + row), row, kv_head,
                KV_HEADS, HEAD_DIM, VALUE_DIM, BLOCK_SIZE, DIM_TILE, VALUE_TILE, HALF, INTERLEAVED,
            )  # fmt: skip
    q_values = None
    if LATENT:
        q_values = read_queries(q_rows + HEAD_DIM, present, VALUE_DIM, VALUE_TILE)
    weighted = tl.zeros([ROW_TILE, VALUE_TILE], tl.float32)
    row_sum = tl.zeros([ROW_TILE], tl.float32)
    row_max = tl.full([ROW_TILE], LOWEST, tl.float32)
    own_rows = rows * 0 + context - 1
    slopes = None
    if slopes_ptr is not None:
        slopes = tl.load(slopes_ptr + head, mask=present, other=0.0)
    table_ptr = block_tables_ptr + request.to(tl.int64) * max_blocks
    if PINNED > 0:
        pinned_end = tl.where(split == 0, tl.minimum(PINNED, first_key), 0)
        weighted, row_sum, row_max = attend_keys(
            weighted, row_sum, row_max, q, q_values, own_rows, None, slopes, None, 0, pinned_end, 0,
            k_cache_ptr, v_cache_ptr, table_ptr, kv_head, scale,
            KV_HEADS, HEAD_DIM, VALUE_DIM, BLOCK_SIZE, SOFTCAP, KEY_TILE,
            CACHE_FORMAT, CACHE_GROUP, VALUE_FORMAT, VALUE_GROUP, True,
        )  # fmt: skip
    older_to = end
    if RECENT > 0:
        older_to = tl.maximum(start, tl.minimum(end, context - RECENT))
    whole_tiles_to = start + (older_to - start) // KEY_TILE * KEY_TILE
    weighted, row_sum, row_max = attend_keys(
        weighted, row_sum, row_max, q, q_values, own_rows, None, slopes, None, start, whole_tiles_to, first_key,
        k_cache_ptr, v_cache_ptr, table_ptr, kv_head, scale,
        KV_HEADS, HEAD_DIM, VALUE_DIM, BLOCK_SIZE, SOFTCAP, KEY_TILE,
        CACHE_FORMAT, CACHE_GROUP, VALUE_FORMAT, VALUE_GROUP, False,
    )  # fmt: skip
    weighted, row_sum, row_max = attend_keys(
        weighted, row_sum, row_max, q, q_values, own_rows, None, slopes, None, whole_tiles_to, older_to, first_key,
        k_cache_ptr, v_cache_ptr, table_ptr, kv_head, scale,
        KV_HEADS, HEAD_DIM, VALUE_DIM, BLOCK_SIZE, SOFTCAP, KEY_TILE,
        CACHE_FORMAT, CACHE_GROUP, VALUE_FORMAT, VALUE_GROUP, True,
    )  # fmt: skip
    if RECENT > 0:
        ahead = rows_ahead(recent_lens_ptr, request, context)
        weighted, row_sum, row_max = attend_keys(
            weighted, row_sum, row_max, q, q_values, own_rows + ahead, None, slopes, None,
            older_to + ahead, end + ahead, older_to + ahead,
            recent_k_ptr, recent_v_ptr, recent_tables_ptr + request.to(tl.int64) * max_blocks, kv_head, scale,
            KV_HEADS, HEAD_DIM, VALUE_DIM, BLOCK_SIZE, SOFTCAP, KEY_TILE, "none", 0, "none", 0, True,
        )  # fmt: skip

    partial = ((request.to(tl.int64) * KV_HEADS * SHARES * GROUP + head) * SPLITS + split) * (VALUE_TILE + 4)
    tl.store(partials_ptr + partial[:, None] + value_dims[None, :], weighted, mask=present[:, None])
    tl.store(partials_ptr + partial + VALUE_TILE, row_max, mask=present)
    tl.store(partials_ptr + partial + VALUE_TILE + 1, row_sum, mask=present)
    used = tl.cdiv(context - first_key, split_keys)
    if SPLITS == 1:
        tl.debug_barrier()
        is_end = True
    else:
        is_end = is_last(arrivals_ptr, request * (KV_HEADS * SHARES) + share, used)
    if is_end:
        y_row = y_ptr + row.to(tl.int64) * y_row_stride
        for place in tl.range(GROUP, loop_unroll_factor=min(GROUP, _JOINED_TOGETHER)):
            join_splits(
                partials_ptr, sinks_ptr, y_row, request, share * GROUP + place, used,
                KV_HEADS * SHARES * GROUP, VALUE_DIM, VALUE_TILE, SPLITS,
            )  # fmt: skip


@triton.jit
def write_own_key(
    k_row: tl.tensor,
    v_row: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    k_cache_ptr: tl.tensor,
    v_cache_ptr: tl.tensor,
    slot: tl.tensor,
    token: tl.tensor,
    kv_head: tl.tensor,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DIM_TILE: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
) -> None:
    """Turn a token's key of one head, and write it and the value to their slot, for all threads of the program to
    read. Programs that share the head write the same bits."""
    head = kv_head + tl.arange(0, 1)
    place = slot_rows(slot.to(tl.int64), head, KV_HEADS, BLOCK_SIZE)[:, None]
    is_head = (head < KV_HEADS)[:, None]
    dims = tl.arange(0, DIM_TILE)[None, :]
    source = k_row + head[:, None] * HEAD_DIM
    key = turned(source, is_head, token, cos_ptr, sin_ptr, HEAD_DIM, DIM_TILE, HALF, INTERLEAVED)
    tl.store(k_cache_ptr + place * HEAD_DIM + dims, key.to(k_cache_ptr.dtype.element_ty), mask=dims < HEAD_DIM)
    dims = tl.arange(0, VALUE_TILE)[None, :]
    value = tl.load(v_row + head[:, None] * VALUE_DIM + dims, mask=dims < VALUE_DIM, other=0.0)
    tl.store(v_cache_ptr + place * VALUE_DIM + dims, value.to(v_cache_ptr.dtype.element_ty), mask=dims < VALUE_DIM)
    tl.debug_barrier()


@triton.jit
def join_splits(
    partials_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    y_row: tl.tensor,
    request: tl.tensor,
    head: tl.tensor,
    used: tl.tensor,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    SPLITS: tl.constexpr,
) -> None:
    """Join the partial results of one head. used: the number of splits with keys, which come first."""
    splits, value_dims = tl.arange(0, SPLITS), tl.arange(0, VALUE_TILE)
    has_keys = splits < used
    partial = ((request.to(tl.int64) * HEADS + head) * SPLITS + splits) * (VALUE_TILE + 4)
    maxima = tl.load(partials_ptr + partial + VALUE_TILE, mask=has_keys, other=LOWEST)
    sums = tl.load(partials_ptr + partial + VALUE_TILE + 1, mask=has_keys, other=0.0)
    parts = tl.load(partials_ptr + partial[:, None] + value_dims[None, :], mask=has_keys[:, None], other=0.0)
    largest = tl.max(maxima, 0)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head) * LOG2E
        largest = tl.maximum(largest, sink)
    shares = tl.exp2(maxima - largest)
    total = sum_of_products(sums, shares, 0)
    if sinks_ptr is not None:
        total += tl.exp2(sink - largest)
    y = sum_of_products(parts, shares[:, None], 0) / total
    y_ptrs = y_row + head * VALUE_DIM + value_dims
    tl.store(y_ptrs, y.to(y_row.dtype.element_ty), mask=value_dims < VALUE_DIM)


@triton.jit
def split_of(
    context: tl.tensor,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLITS: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    KEY_TILE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """(first key that is seen, keys a split): from the request's own context, so its result has no neighbours in it."""
    first_key = first_seen(context - 1, WINDOW, CHUNK)
    split_keys = tl.cdiv(tl.cdiv(context - first_key, SPLITS), KEY_TILE) * KEY_TILE
    return first_key, tl.maximum(split_keys, MIN_SPLIT)


paged_decode_budget = Budget(
    "paged_decode_kernel",
    (
        *READ_ONCE,
        Limit("bytes_in_flight", "a ring of two tiles of keys and of values", at_least=48 * 1024),
    ),
    streams=("k_cache_ptr", "v_cache_ptr"),
)
