"""The matrix and the offset by which a key's leverage is |k·M - offset|², from sketches X = K·S of all keys.

    M = S·L⁻ᵀ,   offset = mean(X)·L⁻ᵀ,   LLᵀ = XᵀX + εI of centred X

The first launch reads the keys once and leaves, for a part of the rows that may leave, their mean and XᵀX about it. The
second launch joins the parts.
"""

import triton
import triton.language as tl

from llmc.codegen.triton.kernels.compaction.key_sketches import SKETCH, SKETCH_TILE, multiplied_keys
from llmc.codegen.triton.kernels.compaction.row_parts import part_of_rows
from llmc.codegen.triton.machine_code.budget import Budget

# ε, which no pivot is below: XᵀX has no negative eigenvalue.
_RIDGE = tl.constexpr(1e-2)


@triton.jit
def sketch_moments_kernel(
    k_cache_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    compaction_ptr: tl.tensor,
    sketch_ptr: tl.tensor,
    angles_ptr: tl.tensor,
    means_ptr: tl.tensor,
    products_ptr: tl.tensor,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    SPREAD_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CACHE_FORMAT: tl.constexpr,
    CACHE_GROUP: tl.constexpr,
    SINKS: tl.constexpr,
    RECENT: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Program (s, h): part s of head h's rows. Grid: (PARTS, KV_HEADS). Nothing is done where all rows stay.

    means: [KV_HEADS, PARTS, SKETCH_TILE]. products: XᵀX of each part.
    """
    if tl.load(compaction_ptr + 1) >= tl.load(compaction_ptr):
        return
    kv_head = tl.program_id(1)
    start, end = part_of_rows(compaction_ptr, tl.program_id(0), SINKS, RECENT, PARTS, ROWS)
    # Sums are about the mean of the first tile, so that no digits cancel.
    center, total = tl.zeros([SKETCH_TILE], tl.float32), tl.zeros([SKETCH_TILE], tl.float32)
    product = tl.zeros([SKETCH_TILE, SKETCH_TILE], tl.float32)
    for tile in tl.range(start, end, ROWS):
        row = tile + tl.arange(0, ROWS)
        present = row < end
        x = multiplied_keys(
            k_cache_ptr, positions_ptr, compaction_ptr, sketch_ptr, angles_ptr, row, present, kv_head,
            KV_HEADS, HEAD_DIM, HALF, INTERLEAVED, SPREAD_BLOCK, BLOCK_SIZE, CACHE_FORMAT, CACHE_GROUP,
        )  # fmt: skip
        mean = tl.sum(x, 0) / tl.minimum(end - start, ROWS).to(tl.float32)
        center = tl.where(tile == start, mean, center)
        x = tl.where(present[:, None], x - center[None, :], 0.0)
        total += tl.sum(x, 0)
        product = tl.dot(tl.trans(x), x, product, input_precision="ieee")
    column = tl.arange(0, SKETCH_TILE)
    offset = total / tl.maximum(end - start, 1).to(tl.float32)
    place = kv_head * PARTS + tl.program_id(0)
    tl.store(means_ptr + place * SKETCH_TILE + column, center + offset)
    element = (place * SKETCH_TILE + column)[:, None] * SKETCH_TILE + column[None, :]
    tl.store(products_ptr + element, product - total[:, None] * offset[None, :])


@triton.jit
def whiten_sketches_kernel(
    compaction_ptr: tl.tensor,
    sketch_ptr: tl.tensor,
    means_ptr: tl.tensor,
    products_ptr: tl.tensor,
    matrix_ptr: tl.tensor,
    offset_ptr: tl.tensor,
    HEAD_DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    SINKS: tl.constexpr,
    RECENT: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Program h: matrix [KV_HEADS, HEAD_DIM, SKETCH] and offset [KV_HEADS, SKETCH_TILE] of head h. Grid: (KV_HEADS).

    Step j of Cholesky's factorization also eliminates column j in front of Sᵀ and of the mean.
    """
    rows = tl.load(compaction_ptr)
    if tl.load(compaction_ptr + 1) >= rows:
        return
    kv_head = tl.program_id(0)
    index, channel = tl.arange(0, SKETCH_TILE), tl.arange(0, DIM_TILE)
    count = (rows - RECENT - SINKS).to(tl.float32)
    mean = tl.zeros([SKETCH_TILE], tl.float32)
    for part in tl.range(0, PARTS):
        start, end = part_of_rows(compaction_ptr, part, SINKS, RECENT, PARTS, ROWS)
        own = tl.load(means_ptr + (kv_head * PARTS + part) * SKETCH_TILE + index)
        mean += own * ((end - start).to(tl.float32) / count)
    ridge = tl.where(index[:, None] == index[None, :], _RIDGE, 0.0)
    left = ridge + tl.zeros([SKETCH_TILE, SKETCH_TILE], tl.float32)
    for part in tl.range(0, PARTS):
        start, end = part_of_rows(compaction_ptr, part, SINKS, RECENT, PARTS, ROWS)
        place = kv_head * PARTS + part
        off = tl.load(means_ptr + place * SKETCH_TILE + index) - mean
        element = (place * SKETCH_TILE + index)[:, None] * SKETCH_TILE + index[None, :]
        left += tl.load(products_ptr + element)
        left += (off * (end - start).to(tl.float32))[:, None] * off[None, :]
    place = channel[None, :] * SKETCH + index[:, None]
    inside = (index < SKETCH)[:, None] & (channel < HEAD_DIM)[None, :]
    right, offset = tl.load(sketch_ptr + place, mask=inside, other=0.0), mean
    for step in tl.range(0, SKETCH):
        is_step = index == step
        column = tl.sum(tl.where(is_step[None, :], left, 0.0), 1)
        root = tl.sqrt_rn(tl.maximum(tl.sum(tl.where(is_step, column, 0.0), 0), _RIDGE))
        below = tl.where(index > step, column / root, 0.0)
        left -= below[:, None] * below[None, :]
        row = tl.sum(tl.where(is_step[:, None], right, 0.0), 0) / root
        right = tl.where(is_step[:, None], row[None, :], right - below[:, None] * row[None, :])
        own = tl.sum(tl.where(is_step, offset, 0.0), 0) / root
        offset = tl.where(is_step, own, offset - below * own)
    tl.store(matrix_ptr + kv_head * HEAD_DIM * SKETCH + place, right, mask=inside)
    tl.store(offset_ptr + kv_head * SKETCH_TILE + index, offset)


sketch_moments_budget = Budget("sketch_moments_kernel")
whiten_sketches_budget = Budget("whiten_sketches_kernel")
