"""llmc::score_keys: the attention of a request's last queries, averaged over neighbouring rows.

score[h, r] = Σ of mass[h, j] for |j - r| ≤ pool / 2 before the queries, / (pool · pairs)
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl

from llmc.codegen.call import Call
from llmc.codegen.triton.kernel import DeviceLaunch, KernelTemplate
from llmc.codegen.triton.kernels.compaction.key_masses import mass_launches, refuse_scoring
from llmc.codegen.triton.machine_code.budget import Budget
from llmc.targets import GpuTarget

_ROWS = 256


@triton.jit
def pool_masses_kernel(
    masses_ptr: tl.tensor,
    compaction_ptr: tl.tensor,
    scores_ptr: tl.tensor,
    GROUP: tl.constexpr,
    POOL: tl.constexpr,
    LONGEST: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Program (i, h): the i-th ROWS rows of head h, 0 from the queries' rows on. Grid: (tiles, KV heads)."""
    kv_head = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    queries = tl.load(compaction_ptr + 2)
    seen = tl.load(compaction_ptr) - queries
    mass = tl.zeros([ROWS], tl.float32)
    for i in range(POOL):
        at = row + i - POOL // 2
        mass += tl.load(masses_ptr + kv_head * LONGEST + at, mask=(at >= 0) & (at < seen), other=0.0)
    divisor = (queries * (GROUP * POOL)).to(tl.float32) + tl.zeros_like(mass)
    score = tl.where(row < seen, tl.div_rn(mass, divisor), 0.0)
    tl.store(scores_ptr + kv_head * LONGEST + row, score, mask=row < LONGEST)


def candidates(call: Call, target: GpuTarget) -> tuple[DeviceLaunch, ...]:
    heads, kv_heads, longest = call.shape("q_first")[-3], call.shape("k_cache")[-3], int(call.plain("longest"))
    masses = call.workspace("masses", 1, kv_heads * longest, torch.float32).pointer
    first, second = mass_launches(call, masses)
    pool = DeviceLaunch(
        pool_masses_kernel,
        {"masses_ptr": masses, "compaction_ptr": call.vector("compaction"), "scores_ptr": call.result().pointer},
        {"GROUP": heads // kv_heads, "POOL": call.plain("pool"), "LONGEST": longest, "ROWS": _ROWS},
        (str(triton.cdiv(longest, _ROWS)), str(kv_heads)),
    )
    return (replace(first, then=(second, pool)),)


score_keys = KernelTemplate(torch.ops.llmc.score_keys.default, refuse_scoring, candidates)

pool_masses_budget = Budget("pool_masses_kernel")
