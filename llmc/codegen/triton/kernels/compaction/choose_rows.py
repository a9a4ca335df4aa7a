"""The rows of each head with the highest scores, in order: best_rows of llmc/ops/compact_kv.py.

A program finds the least score that stays, four of its bits at a time from the highest: it counts the rows at or above
each of sixteen candidates. Then it lists the rows above it, and the first of those that equal it.
"""

import torch
import triton
import triton.language as tl

from llmc.codegen.call import Call
from llmc.codegen.triton.kernel import DeviceLaunch
from llmc.codegen.triton.machine_code.budget import Budget
from llmc.program.launch_arguments import Operand

_LAST = tl.constexpr(0x7FFFFFFF)


@triton.jit
def choose_rows_kernel(
    scores_ptr: tl.tensor,
    compaction_ptr: tl.tensor,
    chosen_ptr: tl.tensor,
    SINKS: tl.constexpr,
    RECENT: tl.constexpr,
    LONGEST: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Program h lists head h's kept rows in chosen: [KV heads, LONGEST]. Grid: (KV heads).

    scores: [KV heads, LONGEST]. The first SINKS and the last RECENT rows are kept whatever their scores.
    """
    kv_head = tl.program_id(0)
    rows, kept = tl.load(compaction_ptr), tl.load(compaction_ptr + 1)
    scores_ptr += kv_head * LONGEST
    last = tl.maximum(rows - RECENT, SINKS)
    wanted = kept - SINKS - (rows - last)
    digit = tl.arange(0, 16)
    least = tl.full([], -(2**31), tl.int64)
    for step in tl.static_range(8):
        candidate = (least + (digit.to(tl.int64) << (28 - 4 * step))).to(tl.int32)
        counts = tl.zeros([16], tl.int32)
        for tile in tl.range(SINKS, last, ROWS):
            row = tile + tl.arange(0, ROWS)
            order = _order(scores_ptr, row, row < last)
            is_above = (order[:, None] >= candidate[None, :]) & (row < last)[:, None]
            counts += tl.sum(is_above.to(tl.int32), 0)
        # Counts fall from candidate to candidate; that of the first is at least `wanted`.
        found = tl.maximum(tl.sum((counts >= wanted).to(tl.int32), 0) - 1, 0)
        least += found.to(tl.int64) << (28 - 4 * step)
    threshold = least.to(tl.int32)
    above = tl.zeros([ROWS], tl.int32)
    for tile in tl.range(SINKS, last, ROWS):
        row = tile + tl.arange(0, ROWS)
        above += ((_order(scores_ptr, row, row < last) > threshold) & (row < last)).to(tl.int32)
    ties = wanted - tl.sum(above, 0)
    place, tied = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    for tile in tl.range(0, rows, ROWS):
        row = tile + tl.arange(0, ROWS)
        is_scored = (row >= SINKS) & (row < last)
        order = _order(scores_ptr, row, is_scored)
        is_tie = (is_scored & (order == threshold)).to(tl.int32)
        is_kept = (row < rows) & ((row < SINKS) | (row >= last))
        is_kept = is_kept | (is_scored & (order > threshold))
        is_kept = is_kept | ((is_tie > 0) & (tied + tl.cumsum(is_tie, 0) - is_tie < ties))
        keeps = is_kept.to(tl.int32)
        at = place + tl.cumsum(keeps, 0) - keeps
        tl.store(chosen_ptr + kv_head * LONGEST + at, row, mask=is_kept)
        place += tl.sum(keeps, 0)
        tied += tl.sum(is_tie, 0)


@triton.jit
def _order(scores_ptr: tl.tensor, row: tl.tensor, present: tl.tensor) -> tl.tensor:
    """Scores as integers that order as they do: negative ones are mirrored."""
    score = tl.load(scores_ptr + row, mask=present, other=0.0)
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ _LAST, bits)


def choosing(call: Call, kv_heads: int, sinks: int, recent: int) -> tuple[DeviceLaunch, Operand, int]:
    """The launch for an op with `scores` and `compaction`, where it leaves the rows, and `LONGEST`."""
    longest = call.shape("scores")[-1] // kv_heads
    scores = call.rows("scores")
    assert scores is not None
    chosen = call.workspace("chosen", 1, kv_heads * longest, torch.int32).pointer
    launch = DeviceLaunch(
        choose_rows_kernel,
        {"scores_ptr": scores.pointer, "compaction_ptr": call.vector("compaction"), "chosen_ptr": chosen},
        {"SINKS": sinks, "RECENT": recent, "LONGEST": longest, "ROWS": 512},
        (str(kv_heads),),
        num_warps=8,
    )
    return launch, chosen, longest


choose_rows_budget = Budget("choose_rows_kernel")
