"""Scores of llmc::score_leverage from the leverage of rows and the attention to them, standardized over all heads.

    score[r] = (1 - kept / tokens) · z(leverage[r]) + z(pooled[r]),   z(x) = (x - mean) / deviation

Mean and deviation are joined from those of the parts that other programs have read (row_parts.py).
"""

import triton
import triton.language as tl

from llmc.codegen.triton.kernels.compaction.key_sketches import row_positions
from llmc.codegen.triton.kernels.compaction.row_parts import joined_parts, part_of_rows
from llmc.codegen.triton.machine_code.budget import Budget

_LEAST_DEVIATION = tl.constexpr(1e-6)


@triton.jit
def blend_scores_kernel(
    positions_ptr: tl.tensor,
    compaction_ptr: tl.tensor,
    pooled_ptr: tl.tensor,
    moments_ptr: tl.tensor,
    scores_ptr: tl.tensor,
    new_positions_ptr: tl.tensor,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SINKS: tl.constexpr,
    RECENT: tl.constexpr,
    LONGEST: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    MOMENTS: tl.constexpr,
    SCORES: tl.constexpr,
) -> None:
    """Program (i, h): the i-th SCORES rows of head h, whose leverages are in scores. Grid: (tiles, KV_HEADS)."""
    kv_head = tl.program_id(1)
    rows, kept = tl.load(compaction_ptr), tl.load(compaction_ptr + 1)
    row = tl.program_id(0) * SCORES + tl.arange(0, SCORES)
    place, inside = kv_head * LONGEST + row, row < LONGEST
    position = row_positions(positions_ptr, compaction_ptr, row, kv_head, KV_HEADS, BLOCK_SIZE)
    tl.store(new_positions_ptr + place, tl.where(row < rows, position, 0.0), mask=inside)
    score = tl.zeros([SCORES], tl.float32)
    if kept < rows:
        is_free = (row >= SINKS) & (row < rows - RECENT)
        leverage = tl.load(scores_ptr + place, mask=is_free, other=0.0)
        pooled = tl.load(pooled_ptr + place, mask=is_free, other=0.0)
        tokens = row_positions(positions_ptr, compaction_ptr, rows - 1, 0, KV_HEADS, BLOCK_SIZE) + 1.0
        share = 1.0 - kept.to(tl.float32) / tokens
        count = (rows - RECENT - SINKS).to(tl.float32) * KV_HEADS
        of_leverage = _standardized(
            leverage, moments_ptr, compaction_ptr, count, KV_HEADS, SINKS, RECENT, PARTS, ROWS, MOMENTS
        )
        of_pooled = _standardized(
            pooled, moments_ptr + 2 * KV_HEADS * PARTS, compaction_ptr, count,
            KV_HEADS, SINKS, RECENT, PARTS, ROWS, MOMENTS,
        )  # fmt: skip
        score = tl.where(is_free, share * of_leverage + of_pooled, 0.0)
    tl.store(scores_ptr + place, score, mask=inside)


@triton.jit
def _standardized(
    x: tl.tensor,
    moments_ptr: tl.tensor,
    compaction_ptr: tl.tensor,
    count: tl.tensor,
    KV_HEADS: tl.constexpr,
    SINKS: tl.constexpr,
    RECENT: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    MOMENTS: tl.constexpr,
) -> tl.tensor:
    """z of x among the rows of all heads. moments: [2, KV_HEADS, PARTS]. MOMENTS: KV_HEADS · PARTS or more."""
    part = tl.arange(0, MOMENTS)
    present = part < KV_HEADS * PARTS
    start, end = part_of_rows(compaction_ptr, part % PARTS, SINKS, RECENT, PARTS, ROWS)
    counts = tl.where(present, (end - start).to(tl.float32), 0.0)
    means = tl.load(moments_ptr + part, mask=present, other=0.0)
    squares = tl.load(moments_ptr + KV_HEADS * PARTS + part, mask=present, other=0.0)
    mean, square = joined_parts(means, squares, counts, count)
    deviation = tl.maximum(tl.sqrt_rn(square / (count - 1.0)), _LEAST_DEVIATION)
    return (x - mean) / deviation


blend_scores_budget = Budget("blend_scores_kernel")
