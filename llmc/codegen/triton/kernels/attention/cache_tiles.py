"""Copy the keys and values that a program of attention reads from the paged cache to rings in shared memory (TMA).

A ring is (tiles, full, empty): STAGES tiles of KEY_TILE rows, and two mbarriers for each. `full` completes when the
bytes of a tile have arrived, `empty` when both groups of warps have multiplied it. Written in Gluon, for sm_90.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

# The copy of a tile, by its name in newer versions of Triton or in older ones.
load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
# More rows than a cache has: copies are within a request's blocks.
MOST_ROWS = gl.constexpr(0x7FFFFFFF)
# A row before the first one: a copy from there fills its target with zeros.
NOWHERE = gl.constexpr(-(1 << 20))


@gluon.jit
def copy_tiles(
    k_cache_ptr: gl.tensor,
    v_cache_ptr: gl.tensor,
    table_ptr: gl.tensor,
    keys: gl.tuple,
    context: gl.tensor,
    kv_head: gl.tensor,
    k_ring: gl.tuple,
    v_ring: gl.tuple,
    KV_HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    VALUE_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    KEY_TILE: gl.constexpr,
    STAGES: gl.constexpr,
) -> None:
    """The producer: every tile of keys and of values, in the order in which they are multiplied."""
    k_rows = _rows_of(k_cache_ptr, MOST_ROWS, HEAD_DIM, BLOCK_SIZE)
    v_rows = _rows_of(v_cache_ptr, MOST_ROWS, VALUE_DIM, BLOCK_SIZE)
    start, end, _ = keys
    last = gl.cdiv(end - start, KEY_TILE) - 1
    for turn in range(last):
        tile = start + turn * KEY_TILE
        _copy_tile(
            k_rows, k_ring, turn, tile, end, keys, table_ptr, kv_head,
            KV_HEADS, HEAD_DIM, BLOCK_SIZE, KEY_TILE, STAGES,
        )  # fmt: skip
        _copy_tile(
            v_rows, v_ring, turn, tile, end, keys, table_ptr, kv_head,
            KV_HEADS, VALUE_DIM, BLOCK_SIZE, KEY_TILE, STAGES,
        )  # fmt: skip
    # Only the last block can have rows that nothing was written to: they do not exist for its own descriptor.
    tile = start + last * KEY_TILE
    whole = gl.minimum(end, context // BLOCK_SIZE * BLOCK_SIZE)
    _copy_tile(
        k_rows, k_ring, last, tile, whole, keys, table_ptr, kv_head,
        KV_HEADS, HEAD_DIM, BLOCK_SIZE, KEY_TILE, STAGES,
    )  # fmt: skip
    _copy_tile(
        v_rows, v_ring, last, tile, whole, keys, table_ptr, kv_head,
        KV_HEADS, VALUE_DIM, BLOCK_SIZE, KEY_TILE, STAGES,
    )  # fmt: skip
    if whole < end:
        block = gl.load(table_ptr + whole // BLOCK_SIZE).to(gl.int64) * KV_HEADS + kv_head
        place = (whole - tile) // BLOCK_SIZE
        _copy_block(k_cache_ptr, k_ring, last, block, place, context - whole, HEAD_DIM, BLOCK_SIZE, KEY_TILE, STAGES)
        _copy_block(v_cache_ptr, v_ring, last, block, place, context - whole, VALUE_DIM, BLOCK_SIZE, KEY_TILE, STAGES)


@gluon.jit
def _copy_tile(
    rows: tma.tensor_descriptor,
    ring: gl.tuple,
    turn: gl.tensor,
    tile: gl.tensor,
    whole: gl.tensor,
    keys: gl.tuple,
    table_ptr: gl.tensor,
    kv_head: gl.tensor,
    KV_HEADS: gl.constexpr,
    DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    KEY_TILE: gl.constexpr,
    STAGES: gl.constexpr,
) -> None:
    """Copy the blocks of KEY_TILE keys from `tile` on, with zeros for blocks that no query sees, as soon as the tile of
    STAGES turns ago has been multiplied. The block at `whole` is left out if keys end in it."""
    _, end, first_key = keys
    tiles, full, empty = ring
    stage = turn % STAGES
    mbarrier.wait(empty.index(stage), turn // STAGES & 1 ^ 1)
    mbarrier.expect(full.index(stage), KEY_TILE * DIM * rows.dtype.primitive_bitwidth // 8)
    for i in gl.static_range(KEY_TILE // BLOCK_SIZE):
        key = tile + i * BLOCK_SIZE
        is_seen = (key + BLOCK_SIZE > first_key) & (key < whole)
        block = gl.load(table_ptr + key // BLOCK_SIZE, mask=is_seen, other=0)
        row = gl.where(is_seen, (block * KV_HEADS + kv_head) * BLOCK_SIZE, NOWHERE)
        part = tiles.index(stage).slice(i * BLOCK_SIZE, BLOCK_SIZE)
        load_tile(rows, [row, 0], full.index(stage), part, pred=(key != whole) | (whole == end))


@gluon.jit
def _copy_block(
    cache_ptr: gl.tensor,
    ring: gl.tuple,
    turn: gl.tensor,
    block: gl.tensor,
    place: gl.tensor,
    count: gl.tensor,
    DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    KEY_TILE: gl.constexpr,
    STAGES: gl.constexpr,
) -> None:
    """Copy the first `count` rows of a block, and zeros for the others, to a place of the tile of a turn."""
    tiles, full, _ = ring
    stage = turn % STAGES
    rows = _rows_of(cache_ptr + block * (BLOCK_SIZE * DIM), count, DIM, BLOCK_SIZE)
    for i in gl.static_range(KEY_TILE // BLOCK_SIZE):
        part = tiles.index(stage).slice(i * BLOCK_SIZE, BLOCK_SIZE)
        load_tile(rows, [0, 0], full.index(stage), part, pred=place == i)


@gluon.jit
def _rows_of(
    cache_ptr: gl.tensor, count: gl.tensor, DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr
) -> tma.tensor_descriptor:
    """Rows of a cache, for copies of a block."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_SIZE, DIM], cache_ptr.dtype.element_ty)
    return tma.make_tensor_descriptor(cache_ptr, [count, DIM], [DIM, 1], [BLOCK_SIZE, DIM], LAYOUT)
