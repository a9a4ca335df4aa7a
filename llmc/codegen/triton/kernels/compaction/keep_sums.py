"""llmc::keep_sums: write the scores, or other numbers, of the rows that compact_kv keeps to where it moves them."""

from dataclasses import replace

import torch
import triton
import triton.language as tl

from llmc.codegen.call import Call
from llmc.codegen.triton.kernel import DeviceLaunch, KernelTemplate
from llmc.codegen.triton.kernels.compaction.choose_rows import choosing
from llmc.codegen.triton.kernels.compaction.compaction_numbers import place_of
from llmc.codegen.triton.kernels.refusals import takes
from llmc.codegen.triton.machine_code.budget import Budget
from llmc.targets import GpuTarget

_ROWS = 256


@triton.jit
def keep_sums_kernel(
    sums_ptr: tl.tensor,
    numbers_ptr: tl.tensor,
    chosen_ptr: tl.tensor,
    compaction_ptr: tl.tensor,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LONGEST: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Program (i, h): the i-th ROWS kept rows of head h. Grid: (tiles, KV_HEADS)."""
    kv_head = tl.program_id(1)
    to = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    present = to < tl.load(compaction_ptr + 1)
    row = tl.load(chosen_ptr + kv_head * LONGEST + to, mask=present, other=0)
    number = tl.load(numbers_ptr + kv_head * LONGEST + row, mask=present)
    block_and_head = place_of(compaction_ptr, to, present, BLOCK_SIZE) * KV_HEADS + kv_head
    tl.store(sums_ptr + block_and_head * BLOCK_SIZE + to % BLOCK_SIZE, number, mask=present)


def candidates(call: Call, target: GpuTarget) -> tuple[DeviceLaunch, ...]:
    kv_heads, block_size, _ = call.shape("sums")[-3:]
    choose, chosen, longest = choosing(call, kv_heads, call.plain("kept_first"), call.plain("kept_last"))
    numbers = call.rows("numbers")
    arguments = {
        "sums_ptr": call.cache("sums"),
        "numbers_ptr": choose.arguments["scores_ptr"] if numbers is None else numbers.pointer,
        "chosen_ptr": chosen,
        "compaction_ptr": choose.arguments["compaction_ptr"],
    }
    constants = {"KV_HEADS": kv_heads, "BLOCK_SIZE": block_size, "LONGEST": longest, "ROWS": _ROWS}
    grid = (str(triton.cdiv(longest, _ROWS)), str(kv_heads))
    return (replace(choose, then=(DeviceLaunch(keep_sums_kernel, arguments, constants, grid),)),)


keep_sums = KernelTemplate(
    torch.ops.llmc.keep_sums.default, takes("sums[_ | kv_heads block_size _] scores[_ | columns]"), candidates
)

keep_sums_budget = Budget("keep_sums_kernel")
