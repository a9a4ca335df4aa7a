"""llmc::last_uses: the number of the update in which a block's rows were last used, plus their share of attention then.

share[b] = Σ of mass over the block's rows / pairs,   used if share[b] ≥ 1 / blocks or the block is new
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl

from llmc.codegen.call import Call
from llmc.codegen.triton.kernel import DeviceLaunch, KernelTemplate
from llmc.codegen.triton.kernels.compaction.compaction_numbers import block_of
from llmc.codegen.triton.kernels.compaction.key_masses import mass_launches, refuse_scoring
from llmc.codegen.triton.machine_code.budget import Budget
from llmc.targets import GpuTarget

# The largest share of attention that is added to a number of updates.
_MOST = tl.constexpr(0.999)
_BLOCKS = 64


@triton.jit
def use_blocks_kernel(
    masses_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    compaction_ptr: tl.tensor,
    scores_ptr: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LONGEST: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_LANES: tl.constexpr,
) -> None:
    """Program (i, h): the i-th BLOCKS blocks of head h, 0 for rows that are not there. Grid: (tiles, KV_HEADS).

    Each reads the uses of all blocks before the queries', because the number of this update follows from the largest.
    """
    kv_head = tl.program_id(1)
    rows, queries = tl.load(compaction_ptr), tl.load(compaction_ptr + 2)
    count, old = rows // BLOCK_SIZE, (rows - queries) // BLOCK_SIZE
    lane = tl.arange(0, BLOCKS)
    latest = tl.zeros([BLOCKS], tl.float32)
    for tile in tl.range(0, old, BLOCKS):
        latest = tl.maximum(latest, _uses(sums_ptr, compaction_ptr, tile + lane, old, kv_head, KV_HEADS, BLOCK_SIZE))
    now = tl.floor(tl.max(latest, 0)) + 1.0
    block = tl.program_id(0) * BLOCKS + lane
    at = tl.arange(0, BLOCK_LANES)
    row = block[:, None] * BLOCK_SIZE + at[None, :]
    inside = (at < BLOCK_SIZE)[None, :] & (row < LONGEST)
    present = inside & (block < count)[:, None]
    masses = tl.load(masses_ptr + kv_head * LONGEST + row, mask=present, other=0.0)
    pairs = (queries * GROUP).to(tl.float32)
    share = tl.div_rn(tl.sum(masses, 1), pairs + tl.zeros([BLOCKS], tl.float32))
    even = tl.div_rn(1.0 + tl.zeros([BLOCKS], tl.float32), count.to(tl.float32) + tl.zeros([BLOCKS], tl.float32))
    before = _uses(sums_ptr, compaction_ptr, block, old, kv_head, KV_HEADS, BLOCK_SIZE)
    used = tl.where((block >= old) | (share >= even), now + tl.minimum(share, _MOST), before)
    score = tl.where(block < count, used, 0.0)[:, None] + tl.zeros([BLOCKS, BLOCK_LANES], tl.float32)
    tl.store(scores_ptr + kv_head * LONGEST + row, score, mask=inside)


@triton.jit
def _uses(
    sums_ptr: tl.tensor,
    compaction_ptr: tl.tensor,
    block: tl.tensor,
    old: tl.tensor,
    kv_head: tl.tensor,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
) -> tl.tensor:
    """The uses of blocks before the queries', 0 for others."""
    number = block_of(compaction_ptr, block * BLOCK_SIZE, block < old, BLOCK_SIZE)
    return tl.load(sums_ptr + (number * KV_HEADS + kv_head) * BLOCK_SIZE, mask=block < old, other=0.0)


def candidates(call: Call, target: GpuTarget) -> tuple[DeviceLaunch, ...]:
    (heads, block_size, _), kv_heads = call.shape("q_first")[-3:], call.shape("k_cache")[-3]
    longest = int(call.plain("longest"))
    masses = call.workspace("masses", 1, kv_heads * longest, torch.float32).pointer
    first, second = mass_launches(call, masses)
    arguments = {
        "masses_ptr": masses,
        "sums_ptr": call.cache("sums"),
        "compaction_ptr": call.vector("compaction"),
        "scores_ptr": call.result().pointer,
    }
    constants = {
        "KV_HEADS": kv_heads,
        "GROUP": heads // kv_heads,
        "BLOCK_SIZE": block_size,
        "LONGEST": longest,
        "BLOCKS": _BLOCKS,
        "BLOCK_LANES": triton.next_power_of_2(block_size),
    }
    grid = (str(triton.cdiv(longest, _BLOCKS * block_size)), str(kv_heads))
    return (replace(first, then=(second, DeviceLaunch(use_blocks_kernel, arguments, constants, grid))),)


last_uses = KernelTemplate(torch.ops.llmc.last_uses.default, refuse_scoring, candidates)

use_blocks_budget = Budget("use_blocks_kernel")
