"""llmc::join_scores: the scores by which the heads of several layers choose rows together.

    joined[h, r] = max(before[r], max over heads g of scores[g, r]),   or before[h, r] + scores[h, r]

Memory-bound: reads the scores of the request's rows once, and writes those of all rows that there may be.
"""

import torch
import triton
import triton.language as tl

from llmc.codegen.call import Call
from llmc.codegen.triton.kernel import DeviceLaunch, KernelTemplate
from llmc.codegen.triton.kernels.refusals import takes
from llmc.codegen.triton.machine_code.budget import Budget
from llmc.targets import GpuTarget

_ROWS = 256


@triton.jit
def join_scores_kernel(
    scores_ptr: tl.tensor,
    before_ptr: tl.tensor,
    compaction_ptr: tl.tensor,
    joined_ptr: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    ACROSS_HEADS: tl.constexpr,
    LONGEST: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Program i: the i-th ROWS rows of all heads. Grid: (tiles).

    scores: [HEADS, LONGEST]. before: [LONGEST] if ACROSS_HEADS, else [KV_HEADS, LONGEST]. joined: [KV_HEADS, LONGEST].
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    present, inside = row < tl.load(compaction_ptr), row < LONGEST
    if ACROSS_HEADS:
        largest = tl.load(scores_ptr + row, mask=present, other=0.0)
        if before_ptr is not None:
            largest = tl.maximum(largest, tl.load(before_ptr + row, mask=present, other=0.0))
        for head in tl.range(1, HEADS):
            largest = tl.maximum(largest, tl.load(scores_ptr + head * LONGEST + row, mask=present, other=0.0))
        for head in tl.range(0, KV_HEADS):
            tl.store(joined_ptr + head * LONGEST + row, largest, mask=inside)
    else:
        for head in tl.range(0, KV_HEADS):
            place = head * LONGEST + row
            total = tl.load(scores_ptr + place, mask=present, other=0.0)
            if before_ptr is not None:
                total += tl.load(before_ptr + place, mask=present, other=0.0)
            tl.store(joined_ptr + place, total, mask=inside)


def candidates(call: Call, target: GpuTarget) -> tuple[DeviceLaunch, ...]:
    longest = int(call.plain("longest"))
    scores, before = call.rows("scores"), call.rows("before")
    assert scores is not None
    launch = DeviceLaunch(
        join_scores_kernel,
        {
            "scores_ptr": scores.pointer,
            "before_ptr": None if before is None else before.pointer,
            "compaction_ptr": call.vector("compaction"),
            "joined_ptr": call.result(0).pointer,
        },
        {
            "HEADS": call.shape("scores")[-1] // longest,
            "KV_HEADS": int(call.plain("kv_heads")),
            "ACROSS_HEADS": call.plain("across_heads"),
            "LONGEST": longest,
            "ROWS": _ROWS,
        },
        (str(triton.cdiv(longest, _ROWS)),),
    )
    return (launch,)


join_scores = KernelTemplate(torch.ops.llmc.join_scores.default, takes("scores[_ | columns]"), candidates)

join_scores_budget = Budget("join_scores_kernel")
