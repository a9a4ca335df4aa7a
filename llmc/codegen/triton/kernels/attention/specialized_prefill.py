"""Paged attention of prompts for sm_90, with warps that load and warps that multiply: the formula of paged_prefill.py.

A producer warp copies tiles of keys and values from the cache into two rings in shared memory (cache_tiles.py). Two
groups of four warps have 64 query rows each, and multiply while they compute the softmax (overlapped_softmax.py).
Source: Shah et al. 2024, "FlashAttention-3".

Written in Gluon, which has no interpreter: Triton's runs interpreted_specialized_prefill_kernel instead.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from llmc.codegen.triton.kernels.attention.attend_keys import LOG2E, LOWEST, first_seen
from llmc.codegen.triton.kernels.attention.cache_tiles import copy_tiles
from llmc.codegen.triton.kernels.attention.overlapped_softmax import GROUP_ROWS, weighted_values
from llmc.codegen.triton.kernels.attention.paged_prefill import paged_prefill_kernel, request_of
from llmc.codegen.triton.machine_code.budget import Budget, Limit

# Registers of a thread that multiplies and of one that copies: no form of the kernel spills. A multiprocessor has 504
# for three threads, one of each group and one that copies.
REGISTERS = gl.constexpr(224)
COPY_REGISTERS = gl.constexpr(56)


@gluon.jit
def specialized_prefill_kernel(
    q_ptr: gl.tensor,
    k_cache_ptr: gl.tensor,
    v_cache_ptr: gl.tensor,
    query_starts_ptr: gl.tensor,
    context_lens_ptr: gl.tensor,
    block_tables_ptr: gl.tensor,
    tree_masks_ptr: gl.tensor,
    sinks_ptr: gl.tensor,
    y_ptr: gl.tensor,
    q_row_stride: int,
    y_row_stride: int,
    requests: int,
    max_blocks: int,
    scale: float,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    VALUE_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
    KEY_TILE: gl.constexpr,
    STAGES: gl.constexpr,
    ALTERNATE: gl.constexpr,
    WARPS: gl.constexpr,
) -> None:
    """Program (g, i): 128 // GROUP queries of one request, with the GROUP query heads of KV head g, as rows.

    Grid and order: those of paged_prefill_kernel. Requests with trees are left to that kernel. ALTERNATE: the two
    groups take turns to queue products, so that one multiplies while the other computes a softmax. WARPS: of a
    group, and of the launch. Must have: BLOCK_SIZE divides KEY_TILE, dimensions are powers of two from 64 on, and q and
    the caches have one 16-bit dtype.
    """
    QUERY_TILE: gl.constexpr = 2 * GROUP_ROWS // GROUP
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    kv_head = gl.program_id(0)
    tile = gl.num_programs(1) - 1 - gl.program_id(1)
    request = request_of(query_starts_ptr, tile, requests, QUERY_TILE)
    first_row = gl.load(query_starts_ptr + request)
    queries = gl.load(query_starts_ptr + request + 1) - first_row
    first_query = (tile - first_row // QUERY_TILE - request) * QUERY_TILE
    if (queries < 2) | (first_query >= queries):
        return
    if tree_masks_ptr is not None:
        # The last token of a tree never sees all others.
        has_tree = gl.load(tree_masks_ptr + first_row + queries - 1) != 0
        if has_tree:
            return
    context = gl.load(context_lens_ptr + request)
    first_own = context - queries + first_query
    end = gl.minimum(first_own + QUERY_TILE, context)
    first_key = first_seen(first_own, WINDOW, 0)
    start = first_key // KEY_TILE * KEY_TILE

    K_TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEY_TILE, HEAD_DIM], dtype)
    V_TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEY_TILE, VALUE_DIM], dtype)
    q_tiles = gl.allocate_shared_memory(dtype, [2, GROUP_ROWS, HEAD_DIM], K_TILE)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, KEY_TILE, HEAD_DIM], K_TILE)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, KEY_TILE, VALUE_DIM], V_TILE)
    k_ring = (k_tiles, _barriers(STAGES, 1), _barriers(STAGES, 2))
    v_ring = (v_tiles, _barriers(STAGES, 1), _barriers(STAGES, 2))
    # Triton 3.6 would put unused barriers where the arguments of the other warps are.
    turns = k_ring[1]
    if ALTERNATE:
        turns = _barriers(2, 1)
    # Copies arrive at the barriers by the asynchronous proxy, which must see them initialized.
    fence_async_shared()
    table_ptr = block_tables_ptr + request.to(gl.int64) * max_blocks
    keys = (start, end, first_key)
    rows = (first_row, first_query, queries, context)
    outside = (q_ptr, sinks_ptr, y_ptr, q_row_stride, y_row_stride, scale)
    gl.warp_specialize(
        [
            (
                _attend,
                (
                    outside, rows, keys, kv_head, q_tiles, k_ring, v_ring, turns,
                    GROUP, HEAD_DIM, VALUE_DIM, WINDOW, SOFTCAP, KEY_TILE, STAGES, ALTERNATE, WARPS, 0,
                ),
            ),
            (
                _attend,
                (
                    outside, rows, keys, kv_head, q_tiles, k_ring, v_ring, turns,
                    GROUP, HEAD_DIM, VALUE_DIM, WINDOW, SOFTCAP, KEY_TILE, STAGES, ALTERNATE, WARPS, 1,
                ),
            ),
            (
                copy_tiles,
                (
                    k_cache_ptr, v_cache_ptr, table_ptr, keys, context, kv_head, k_ring, v_ring,
                    KV_HEADS, HEAD_DIM, VALUE_DIM, BLOCK_SIZE, KEY_TILE, STAGES,
                ),
            ),
        ],
        [4, 1],
        [REGISTERS, COPY_REGISTERS],
    )  # fmt: skip


@gluon.jit
def _attend(
    outside: gl.tuple,
    rows: gl.tuple,
    keys: gl.tuple,
    kv_head: gl.tensor,
    q_tiles: gl.shared_memory_descriptor,
    k_ring: gl.tuple,
    v_ring: gl.tuple,
    turns: gl.shared_memory_descriptor,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    VALUE_DIM: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
    KEY_TILE: gl.constexpr,
    STAGES: gl.constexpr,
    ALTERNATE: gl.constexpr,
    WARPS: gl.constexpr,
    PART: gl.constexpr,
) -> None:
    """Half PART of the program's rows: their queries, the softmax over all keys, and the result."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, KEY_TILE, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, VALUE_DIM, 16])
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [WARPS, 1], [1, 0])
    q_ptr, sinks_ptr, y_ptr, q_row_stride, y_row_stride, scale = outside
    present, token, head, query = _places(rows, kv_head, GROUP, PART, gl.SliceLayout(1, LOADED))
    dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, LOADED))
    q_rows = q_ptr + token * q_row_stride + head * HEAD_DIM
    q_tile = q_tiles.index(PART)
    q_tile.store(gl.load(q_rows[:, None] + dims[None, :], mask=present[:, None], other=0.0))
    fence_async_shared()

    present, token, head, query = _places(rows, kv_head, GROUP, PART, gl.SliceLayout(1, SCORES))
    if sinks_ptr is None:
        row_max = gl.full([GROUP_ROWS], LOWEST, gl.float32, gl.SliceLayout(1, SCORES))
        row_sum = gl.zeros([GROUP_ROWS], gl.float32, gl.SliceLayout(1, SCORES))
    else:
        row_max = gl.load(sinks_ptr + head, mask=present, other=0.0) * LOG2E
        row_sum = gl.full([GROUP_ROWS], 1.0, gl.float32, gl.SliceLayout(1, SCORES))
    _, first_query, queries, context = rows
    weighted, row_sum = weighted_values(
        q_tile, row_sum, row_max, context - queries + query, context - queries + first_query, keys, scale,
        k_ring, v_ring, turns, VALUE_DIM, WINDOW, SOFTCAP, KEY_TILE, STAGES, ALTERNATE, PART, SCORES, VALUES,
    )  # fmt: skip

    present, token, head, query = _places(rows, kv_head, GROUP, PART, gl.SliceLayout(1, VALUES))
    y = weighted / gl.convert_layout(row_sum, gl.SliceLayout(1, VALUES))[:, None]
    y_rows = y_ptr + token * y_row_stride + head * VALUE_DIM
    value_dims = gl.arange(0, VALUE_DIM, gl.SliceLayout(0, VALUES))
    gl.store(y_rows[:, None] + value_dims[None, :], y.to(y_ptr.dtype.element_ty), mask=present[:, None])


@gluon.jit
def _places(
    rows: gl.tuple, kv_head: gl.tensor, GROUP: gl.constexpr, PART: gl.constexpr, LAYOUT: gl.constexpr
) -> tuple[gl.tensor, gl.tensor, gl.tensor, gl.tensor]:
    """Whether each row of half PART exists, its token and head, and its place among the request's queries."""
    first_row, first_query, queries, _ = rows
    row = PART * GROUP_ROWS + gl.arange(0, GROUP_ROWS, LAYOUT)
    query = first_query + row // GROUP
    present = (row < 2 * GROUP_ROWS // GROUP * GROUP) & (query < queries)
    return present, (first_row + query).to(gl.int64), kv_head * GROUP + row % GROUP, query


@gluon.jit
def _barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr) -> gl.shared_memory_descriptor:
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@triton.jit
def interpreted_specialized_prefill_kernel(
    q_ptr: tl.tensor,
    k_cache_ptr: tl.tensor,
    v_cache_ptr: tl.tensor,
    query_starts_ptr: tl.tensor,
    context_lens_ptr: tl.tensor,
    block_tables_ptr: tl.tensor,
    tree_masks_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    y_ptr: tl.tensor,
    q_row_stride: int,
    y_row_stride: int,
    requests: int,
    max_blocks: int,
    scale: float,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    KEY_TILE: tl.constexpr,
    STAGES: tl.constexpr,
    ALTERNATE: tl.constexpr,
    WARPS: tl.constexpr,
) -> None:
    """The same rows by paged_prefill_kernel, for Triton's interpreter."""
    paged_prefill_kernel(
        q_ptr, k_cache_ptr, v_cache_ptr, query_starts_ptr, context_lens_ptr, block_tables_ptr, None, None, None, None,
        tree_masks_ptr, sinks_ptr, None, y_ptr, q_row_stride, y_row_stride, requests, max_blocks, scale,
        KV_HEADS, GROUP, 1, False, HEAD_DIM, VALUE_DIM, BLOCK_SIZE, WINDOW, 0, 0, 0, SOFTCAP, HEAD_DIM, VALUE_DIM,
        "none", 0, "none", 0, 128, KEY_TILE, False,
    )  # fmt: skip


specialized_prefill_budget = Budget(
    "specialized_prefill_kernel",
    (
        Limit("barriers", "warps that multiply and warps that copy must not wait for each other", at_most=0),
        Limit("register_moves", "the producer gives registers to the warps that multiply", at_least=2),
        Limit("bulk_copies", "one thread asks for a whole block of the cache", at_least=1),
        Limit("shared_accesses", "scores stay in registers from one product to the next", at_most=0),
        Limit("exposed_exponentials", "the softmax runs while values are multiplied", at_most=4),
    ),
)
