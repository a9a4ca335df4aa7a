"""llmc::compact_kv: move the rows with the highest scores of each head to the first rows of the compaction's places.

Memory-bound: two launches; the second one reads and writes the kept rows once.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import fx

from llmc.codegen.call import Call, arguments_of
from llmc.codegen.triton.kernel import DeviceLaunch, KernelTemplate
from llmc.codegen.triton.kernels.attention.kv_write import caches
from llmc.codegen.triton.kernels.compaction.choose_rows import choosing
from llmc.codegen.triton.kernels.compaction.compaction_numbers import block_of, place_of
from llmc.codegen.triton.kernels.compaction.stored_rows import move_rows, row_tile, stored_constants
from llmc.codegen.triton.kernels.refusals import refuse_dtypes, refuse_ranks
from llmc.codegen.triton.machine_code.budget import Budget
from llmc.graph.refusal import Refusal
from llmc.targets import GpuTarget


@triton.jit
def compact_kv_kernel(
    k_cache_ptr: tl.tensor,
    v_cache_ptr: tl.tensor,
    chosen_ptr: tl.tensor,
    compaction_ptr: tl.tensor,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEY_ROW: tl.constexpr,
    KEY_SCALES: tl.constexpr,
    VALUE_ROW: tl.constexpr,
    VALUE_SCALES: tl.constexpr,
    LONGEST: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Program (h, 0) moves head h's keys, (h, 1) its values, ROWS at a time in order. Grid: (KV_HEADS, 2)."""
    kv_head = tl.program_id(0)
    kept = tl.load(compaction_ptr + 1)
    for tile in tl.range(0, kept, ROWS):
        to = tile + tl.arange(0, ROWS)
        present = to < kept
        row = tl.load(chosen_ptr + kv_head * LONGEST + to, mask=present, other=0)
        source = block_of(compaction_ptr, row, present, BLOCK_SIZE)
        place = place_of(compaction_ptr, to, present, BLOCK_SIZE)
        present = present & ((row != to) | (source != place))
        if tl.program_id(1) == 0:
            move_rows(k_cache_ptr, source, row, place, to, present, kv_head, KV_HEADS, BLOCK_SIZE, KEY_ROW, KEY_SCALES)
        else:
            move_rows(
                v_cache_ptr, source, row, place, to, present, kv_head, KV_HEADS, BLOCK_SIZE, VALUE_ROW, VALUE_SCALES
            )


def refuse_stored(node: fx.Node, target: GpuTarget) -> Refusal | None:
    """Refuse caches unless both have one float dtype, or codes."""
    found = refuse_ranks(node, k_cache=(4,), v_cache=(4,))
    if found is None and arguments_of(node)["cache_format"] is None:
        return refuse_dtypes(node, "k_cache", "v_cache")
    return found


def candidates(call: Call, target: GpuTarget) -> tuple[DeviceLaunch, ...]:
    stored = stored_constants(call)
    choose, chosen, longest = choosing(call, stored["KV_HEADS"], call.plain("sinks"), call.plain("recent"))
    move = DeviceLaunch(
        compact_kv_kernel,
        {**caches(call), "chosen_ptr": chosen, "compaction_ptr": call.vector("compaction")},
        {**stored, "LONGEST": longest, "ROWS": row_tile(stored["KEY_ROW"], stored["VALUE_ROW"])},
        (str(stored["KV_HEADS"]), "2"),
    )
    return (replace(choose, then=(move,)),)


compact_kv = KernelTemplate(torch.ops.llmc.compact_kv.default, refuse_stored, candidates)

compact_kv_budget = Budget("compact_kv_kernel")
