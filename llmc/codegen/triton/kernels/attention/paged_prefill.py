"""Paged attention of the requests that bring two tokens or more: prompts, chunks of prompts, drafts and trees of them.

y[t, h] = Σ_j softmax_j(q[t, h]·k[j, h / GROUP]·scale) v[j, h / GROUP],   j ≤ row of t, and not hidden from it
"""

import triton
import triton.language as tl

from llmc.codegen.triton.kernels.attention.attend_keys import (
    LOG2E,
    LOWEST,
    attend_keys,
    bits_set,
    first_seen,
    reach_of,
    read_queries,
    rows_ahead,
)
from llmc.codegen.triton.machine_code.budget import Budget, Limit


@triton.jit
def paged_prefill_kernel(
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
    tree_masks_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    slopes_ptr: tl.tensor,
    y_ptr: tl.tensor,
    q_row_stride: int,
    y_row_stride: int,
    requests: int,
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
    TREES: tl.constexpr,
) -> None:
    """Program (g, i): QUERY_TILE queries of one request, with GROUP query heads from head g·GROUP on, as rows.

    Grid: (KV_HEADS · SHARES, cdiv(T, QUERY_TILE) + R), QUERY_TILE = ROW_TILE // GROUP; SHARES programs have the query
    heads that read one KV head. Each program reads the keys and values that its last query sees once for all its rows;
    the longest ranges start first. Tiles of keys that every row sees are computed without masks; those between PINNED
    and every row's window are not read. The newest RECENT keys that each query sees are read from recent_k and
    recent_v, all others from k_cache and v_cache. Requests with trees, which may hide any of the 63 keys before a
    query's own, are left to a launch with TREES, and the others to one without.
    """
    QUERY_TILE: tl.constexpr = ROW_TILE // GROUP
    share = tl.program_id(0)
    kv_head = share // SHARES
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    request = request_of(query_starts_ptr, tile, requests, QUERY_TILE)
    first_row = tl.load(query_starts_ptr + request)
    queries = tl.load(query_starts_ptr + request + 1) - first_row
    first_query = (tile - first_row // QUERY_TILE - request) * QUERY_TILE
    if (queries < 2) | (first_query >= queries):
        return
    if tree_masks_ptr is not None:
        # The last token of a tree never sees all others.
        has_tree = tl.load(tree_masks_ptr + first_row + queries - 1) != 0
        if has_tree != TREES:
            return
    context = tl.load(context_lens_ptr + request)

    rows = tl.arange(0, ROW_TILE)
    query = first_query + rows // GROUP
    head = share * GROUP + rows % GROUP
    present = (rows < QUERY_TILE * GROUP) & (query < queries)
    token = (first_row + query).to(tl.int64)
    value_dims = tl.arange(0, VALUE_TILE)
    q_rows = q_ptr + token * q_row_stride + head * (HEAD_DIM + VALUE_DIM if LATENT else HEAD_DIM)
    q = read_queries(q_rows, present, HEAD_DIM, DIM_TILE)
    q_values = None
    if LATENT:
        q_values = read_queries(q_rows + HEAD_DIM, present, VALUE_DIM, VALUE_TILE)
    if sinks_ptr is None:
        row_max = tl.full([ROW_TILE], LOWEST, tl.float32)
        row_sum = tl.zeros([ROW_TILE], tl.float32)
    else:
        row_max = tl.load(sinks_ptr + head, mask=present, other=0.0) * LOG2E
        row_sum = tl.full([ROW_TILE], 1.0, tl.float32)
    weighted = tl.zeros([ROW_TILE, VALUE_TILE], tl.float32)

    own_rows = context - queries + query
    first_own = context - queries + first_query
    end = tl.minimum(first_own + QUERY_TILE, context)
    table_ptr = block_tables_ptr + request.to(tl.int64) * max_blocks
    REACH: tl.constexpr = 63 if TREES else 0
    BOUNDED: tl.constexpr = WINDOW > 0 or CHUNK > 0
    first_key = first_seen(tl.maximum(first_own - REACH, 0), WINDOW, CHUNK)
    start = first_key // KEY_TILE * KEY_TILE
    older_to = end
    if RECENT > 0:
        older_to = tl.maximum(end - RECENT, 0)
    all_see_to = start
    # How far a tree's query sees counts what it sees, which only the last tiles know.
    if not (TREES and BOUNDED):
        all_see_to = tl.maximum(tl.maximum(first_own + 1 - (REACH + RECENT), 0) // KEY_TILE * KEY_TILE, start)
    hidden = None
    places = own_rows
    if TREES:
        hidden = tl.load(tree_masks_ptr + token, mask=present, other=0)
        places = own_rows - bits_set(hidden).to(tl.int32)
    reach = None
    if BOUNDED:
        reach = reach_of(places, WINDOW, CHUNK)
    slopes = None
    if slopes_ptr is not None:
        slopes = tl.load(slopes_ptr + head, mask=present, other=0.0)
    # No tree hides keys this far back, so their distance counts hidden keys: it is measured from `places`.
    if BOUNDED and PINNED > 0:
        weighted, row_sum, row_max = attend_keys(
            weighted, row_sum, row_max, q, q_values, places, None, slopes, None, 0, tl.minimum(PINNED, start), 0,
            k_cache_ptr, v_cache_ptr, table_ptr, kv_head, scale,
            KV_HEADS, HEAD_DIM, VALUE_DIM, BLOCK_SIZE, SOFTCAP, KEY_TILE,
            CACHE_FORMAT, CACHE_GROUP, VALUE_FORMAT, VALUE_GROUP, True,
        )  # fmt: skip
    if BOUNDED and not TREES:
        all_see_from = tl.cdiv(first_seen(end - 1, WINDOW, CHUNK), KEY_TILE) * KEY_TILE
        all_see_from = tl.minimum(tl.maximum(all_see_from, start), all_see_to)
        weighted, row_sum, row_max = attend_keys(
            weighted, row_sum, row_max, q, q_values, own_rows, reach, slopes, None, start, all_see_from, first_key,
            k_cache_ptr, v_cache_ptr, table_ptr, kv_head, scale,
            KV_HEADS, HEAD_DIM, VALUE_DIM, BLOCK_SIZE, SOFTCAP, KEY_TILE,
            CACHE_FORMAT, CACHE_GROUP, VALUE_FORMAT, VALUE_GROUP, True,
            PINNED, places,
        )  # fmt: skip
        start = all_see_from
    weighted, row_sum, row_max = attend_keys(
        weighted, row_sum, row_max, q, q_values, places, reach, slopes, None, start, all_see_to, first_key,
        k_cache_ptr, v_cache_ptr, table_ptr, kv_head, scale,
        KV_HEADS, HEAD_DIM, VALUE_DIM, BLOCK_SIZE, SOFTCAP, KEY_TILE,
        CACHE_FORMAT, CACHE_GROUP, VALUE_FORMAT, VALUE_GROUP, False,
    )  # fmt: skip
    weighted, row_sum, row_max = attend_keys(
        weighted, row_sum, row_max, q, q_values, own_rows, reach, slopes, hidden, all_see_to, older_to, first_key,
        k_cache_ptr, v_cache_ptr, table_ptr, kv_head, scale,
        KV_HEADS, HEAD_DIM, VALUE_DIM, BLOCK_SIZE, SOFTCAP, KEY_TILE,
        CACHE_FORMAT, CACHE_GROUP, VALUE_FORMAT, VALUE_GROUP, True,
        PINNED, places, RECENT,
    )  # fmt: skip
    if RECENT > 0:
        ahead = rows_ahead(recent_lens_ptr, request, context)
        near = places * 0 + RECENT
        if BOUNDED:
            near = tl.minimum(near, reach)
        # Tiles begin at the same rows however a prompt is divided.
        first_newest = tl.maximum(first_own + 1 - (REACH + RECENT), first_key) + ahead
        weighted, row_sum, row_max = attend_keys(
            weighted, row_sum, row_max, q, q_values, own_rows + ahead, near, slopes, hidden,
            first_newest // KEY_TILE * KEY_TILE, end + ahead, first_newest,
            recent_k_ptr, recent_v_ptr, recent_tables_ptr + request.to(tl.int64) * max_blocks, kv_head, scale,
            KV_HEADS, HEAD_DIM, VALUE_DIM, BLOCK_SIZE, SOFTCAP, KEY_TILE, "none", 0, "none", 0, True,
        )  # fmt: skip

    y_ptrs = y_ptr + token[:, None] * y_row_stride + head[:, None] * VALUE_DIM + value_dims[None, :]
    y = weighted / row_sum[:, None]
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=present[:, None] & (value_dims[None, :] < VALUE_DIM))


@triton.jit
def request_of(query_starts_ptr: tl.tensor, tile: tl.tensor, requests: int, QUERY_TILE: tl.constexpr) -> tl.tensor:
    """The last request whose tiles start at or before `tile`.

    Request r's tiles start at query_starts[r] // QUERY_TILE + r. This leaves enough tiles for it before the next
    request's, and the grid depends on T and R only; the surplus tiles find no query and end.
    """
    low = tile * 0
    high = low + requests
    while low + 1 < high:
        middle = (low + high) // 2
        starts_before = tl.load(query_starts_ptr + middle) // QUERY_TILE + middle <= tile
        low = tl.where(starts_before, middle, low)
        high = tl.where(starts_before, high, middle)
    return low


# On sm_90, this kernel serves the attention that specialized_prefill.py does not.
paged_prefill_budget = Budget(
    "paged_prefill_kernel",
    (
        Limit(
            "barriers",
            "warps that multiply and warps that exponentiate must not wait for each other",
            at_most=0,
            arches=(80, 100),
        ),
        Limit("bulk_copies", "one thread asks for a whole tile", at_least=1, arches=(100,)),
    ),
)
