"""The inner loop of paged attention: online softmax of a tile of query rows over a range of cached keys.

    s[i, j] = q[i]·k[j]·scale,   y[i] = Σ_j exp(s[i, j] - max) v[j] / Σ_j exp(s[i, j] - max)

in one pass over j: the running maximum grows, and what was summed before is scaled down with it. exp is taken as exp2
with log2(e) folded into the scale, one multiply-add and one exp2 an element. Source: Dao 2023, "FlashAttention-2".
"""

import triton
import triton.language as tl

from llmc.codegen.triton.kernels.attention.cache_codes import read_codes
from llmc.codegen.triton.kernels.interpreted import INTERPRETED

LOG2E = tl.constexpr(1.4426950408889634)
# Below every score, and finite: a row that has seen no key yet makes no inf - inf.
LOWEST = tl.constexpr(-1.0e30)


@triton.jit
def attend_keys(
    weighted: tl.tensor,
    row_sum: tl.tensor,
    row_max: tl.tensor,
    q: tl.tensor,
    q_values: tl.tensor,
    own_rows: tl.tensor,
    reach: tl.tensor,
    slopes: tl.tensor,
    hidden: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    first_key: tl.tensor,
    k_cache_ptr: tl.tensor,
    v_cache_ptr: tl.tensor,
    table_ptr: tl.tensor,
    kv_head: tl.tensor,
    scale: float,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    KEY_TILE: tl.constexpr,
    CACHE_FORMAT: tl.constexpr,
    CACHE_GROUP: tl.constexpr,
    VALUE_FORMAT: tl.constexpr,
    VALUE_GROUP: tl.constexpr,
    MASKED: tl.constexpr,
    PINNED: tl.constexpr = 0,
    places: tl.tensor = None,
    NEAREST: tl.constexpr = 0,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Attend to keys [start, end), KEY_TILE at a time; returns (weighted, row_sum, row_max) brought up to date.

    weighted: [rows, VALUE_TILE], row_sum and row_max (in units of log2): [rows], fp32. q: [rows, DIM_TILE], zero past
    HEAD_DIM. q_values: [rows, VALUE_TILE], what of the queries multiplies values, which then are keys too; None for
    values that are not. own_rows: [rows], where the queries' own keys are. MASKED: keys below first_key, past the end,
    after a query's own or out of its reach are left out, and those before first_key or past the end are not read;
    otherwise every query sees every key. reach: [rows], how many keys a query sees, its own included, None for all.
    PINNED: with a reach, how many keys at the beginning are seen and read all the same. places: [rows], how many keys
    that are not hidden from a query come before its own. NEAREST: with MASKED, how many of the keys nearest to a query,
    its own included, are left out because they are in other caches.
    slopes: [rows], what a key farther back takes off a score, None for nothing. hidden: [rows], int64, None for none:
    bit d leaves out the key d before a query's own, and the others are as near as they are without it.
    CACHE_FORMAT, CACHE_GROUP: of keys' codes, which become numbers here (cache_codes.py); "none" for caches of numbers.
    VALUE_FORMAT, VALUE_GROUP: the same of values.
    """
    DIM_TILE: tl.constexpr = q.shape[1]
    dims = tl.arange(0, DIM_TILE)
    exponent_scale = (SOFTCAP if SOFTCAP > 0 else scale) * LOG2E
    for tile in tl.range(start, end, KEY_TILE):
        keys = tile + tl.arange(0, KEY_TILE)
        if MASKED:
            present = (keys >= first_key) & (keys < end)
            if PINNED > 0:
                present = present | (keys < tl.minimum(PINNED, end))
            blocks = tl.load(table_ptr + keys // BLOCK_SIZE, mask=present, other=0)
        else:
            present = keys >= tile
            blocks = tl.load(table_ptr + keys // BLOCK_SIZE)
        block_and_head = blocks.to(tl.int64) * KV_HEADS + kv_head
        if CACHE_FORMAT == "none":
            slots = block_and_head * BLOCK_SIZE + keys % BLOCK_SIZE
            k_ptrs = k_cache_ptr + slots[:, None] * HEAD_DIM + dims[None, :]
            k = _load(k_ptrs, present[:, None], dims[None, :] < HEAD_DIM, MASKED, DIM_TILE != HEAD_DIM)
        else:
            k = read_codes(
                k_cache_ptr, block_and_head, keys % BLOCK_SIZE, present,
                HEAD_DIM, BLOCK_SIZE, CACHE_FORMAT, CACHE_GROUP, DIM_TILE,
            )  # fmt: skip
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
        if q_values is not None:
            v = _read_values(
                v_cache_ptr, block_and_head, keys, present,
                VALUE_DIM, BLOCK_SIZE, weighted.shape[1], VALUE_FORMAT, VALUE_GROUP, MASKED,
            )  # fmt: skip
            scores = tl.dot(q_values, tl.trans(v.to(q.dtype)), scores, input_precision="ieee")
        if SOFTCAP > 0:
            # tanh(x) = 1 - 2 / (1 + exp(2x)), right at both infinities.
            scores = 1.0 - 2.0 / (1.0 + tl.exp2(scores * (scale * (2.0 * LOG2E / SOFTCAP))))
        back = own_rows[:, None] - keys[None, :]
        visible = present[None, :] & (back >= 0)
        if MASKED and hidden is not None:
            visible = visible & not_hidden(hidden, back)
            back = back - hidden_between(hidden, back)
        if slopes is not None:
            scores = scores - (slopes / (SOFTCAP if SOFTCAP > 0 else scale))[:, None] * back
        if MASKED:
            if reach is not None:
                is_near = back < reach[:, None]
                if PINNED > 0:
                    is_near = is_near | (places[:, None] - back < PINNED)
                visible = visible & is_near
            if NEAREST > 0:
                visible = visible & (back >= NEAREST)
            scores = tl.where(visible, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * exponent_scale)
        weights = tl.exp2(scores * exponent_scale - new_max[:, None])
        shrink = tl.exp2(row_max - new_max)
        row_sum = row_sum * shrink + tl.sum(weights, 1)
        weighted = weighted * shrink[:, None]
        if q_values is None:
            v = _read_values(
                v_cache_ptr, block_and_head, keys, present,
                VALUE_DIM, BLOCK_SIZE, weighted.shape[1], VALUE_FORMAT, VALUE_GROUP, MASKED,
            )  # fmt: skip
        weighted = tl.dot(weights.to(q.dtype), v.to(q.dtype), weighted, input_precision="ieee")
        row_max = new_max
    return weighted, row_sum, row_max


@triton.jit
def _read_values(
    v_cache_ptr: tl.tensor,
    block_and_head: tl.tensor,
    keys: tl.tensor,
    present: tl.tensor,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    VALUE_FORMAT: tl.constexpr,
    VALUE_GROUP: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    if VALUE_FORMAT == "none":
        value_dims = tl.arange(0, VALUE_TILE)
        slots = block_and_head * BLOCK_SIZE + keys % BLOCK_SIZE
        v_ptrs = v_cache_ptr + slots[:, None] * VALUE_DIM + value_dims[None, :]
        return _load(v_ptrs, present[:, None], value_dims[None, :] < VALUE_DIM, MASKED, VALUE_TILE != VALUE_DIM)
    else:
        return read_codes(
            v_cache_ptr, block_and_head, keys % BLOCK_SIZE, present,
            VALUE_DIM, BLOCK_SIZE, VALUE_FORMAT, VALUE_GROUP, VALUE_TILE,
        )  # fmt: skip


@triton.jit
def read_queries(q_ptr: tl.tensor, present: tl.tensor, DIM: tl.constexpr, TILE: tl.constexpr) -> tl.tensor:
    """[rows, TILE] of queries. q_ptr: [rows], where each row's DIM elements begin."""
    dims = tl.arange(0, TILE)
    q = tl.load(q_ptr[:, None] + dims[None, :], mask=present[:, None] & (dims[None, :] < DIM), other=0.0)
    if INTERPRETED:
        q = q.to(tl.float32)
    return q


@triton.jit
def reach_of(places: tl.tensor, WINDOW: tl.constexpr, CHUNK: tl.constexpr) -> tl.tensor:
    """How many keys queries in these places see, their own included, where a window or chunks bound it."""
    reach = places + 1
    if CHUNK > 0:
        reach = places % CHUNK + 1
    if WINDOW > 0:
        reach = tl.minimum(reach, WINDOW)
    return reach


@triton.jit
def first_seen(place: tl.tensor, WINDOW: tl.constexpr, CHUNK: tl.constexpr) -> tl.tensor:
    """The first key that a query in this place sees."""
    first = place * 0
    if WINDOW > 0:
        first = tl.maximum(place - WINDOW + 1, 0)
    if CHUNK > 0:
        first = tl.maximum(place - place % CHUNK, first)
    return first


@triton.jit
def rows_ahead(recent_lens_ptr: tl.tensor, request: tl.tensor, context: tl.tensor) -> tl.tensor:
    """Number of rows that a request has in caches of newest rows in addition to its `context` rows in the others."""
    ahead = context * 0
    if recent_lens_ptr is not None:
        ahead = tl.load(recent_lens_ptr + request) - context
    return ahead


@triton.jit
def not_hidden(hidden: tl.tensor, back: tl.tensor) -> tl.tensor:
    """Whether each row sees the key `back` places before its own."""
    # Bit 0 is never set.
    shift = tl.where((back > 0) & (back < 64), back, 0).to(tl.int64)
    return ((hidden[:, None] >> shift) & 1) == 0


@triton.jit
def hidden_between(hidden: tl.tensor, back: tl.tensor) -> tl.tensor:
    """Number of keys hidden from each row among the last `back - 1` before its own."""
    shift = tl.where((back > 0) & (back < 64), back, 0).to(tl.int64)
    between = tl.where(back < 64, (shift * 0 + 1 << shift) - 1, -1)
    return bits_set(hidden[:, None] & between).to(tl.int32)


@triton.jit
def bits_set(word: tl.tensor) -> tl.tensor:
    """How many bits of an int64 are set; the highest must not be."""
    word = word - ((word >> 1) & 0x5555555555555555)
    word = (word & 0x3333333333333333) + ((word >> 2) & 0x3333333333333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F0F0F0F0F
    return (word * 0x0101010101010101) >> 56


@triton.jit
def _load(
    ptrs: tl.tensor, present: tl.tensor, inside: tl.tensor, MASK_ROWS: tl.constexpr, MASK_COLUMNS: tl.constexpr
) -> tl.tensor:
    """Load a tile, with zeros for masked elements; without a mask where none is needed."""
    if MASK_ROWS and MASK_COLUMNS:
        return tl.load(ptrs, mask=present & inside, other=0.0)
    elif MASK_ROWS:
        return tl.load(ptrs, mask=present, other=0.0)
    elif MASK_COLUMNS:
        return tl.load(ptrs, mask=inside, other=0.0)
    else:
        return tl.load(ptrs)
