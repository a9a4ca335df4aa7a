"""The attention to each row times the norm of its value, for llmc::score_leverage. Memory-bound: reads values once."""

import triton
import triton.language as tl

from llmc.codegen.triton.kernels.agreed_sums import sum_of_products
from llmc.codegen.triton.kernels.attention.cache_codes import read_codes
from llmc.codegen.triton.kernels.compaction.compaction_numbers import block_of
from llmc.codegen.triton.machine_code.budget import Budget


@triton.jit
def weigh_attention_kernel(
    v_cache_ptr: tl.tensor,
    compaction_ptr: tl.tensor,
    attention_ptr: tl.tensor,
    weighted_ptr: tl.tensor,
    KV_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CACHE_FORMAT: tl.constexpr,
    CACHE_GROUP: tl.constexpr,
    LONGEST: tl.constexpr,
    VALUES: tl.constexpr,
) -> None:
    """Program (i, h): the i-th VALUES rows of head h. Grid: (tiles, KV_HEADS). Nothing is done where all rows stay.

    attention, weighted: [KV_HEADS, LONGEST].
    """
    rows, kv_head = tl.load(compaction_ptr), tl.program_id(1)
    if tl.load(compaction_ptr + 1) >= rows:
        return
    row = tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    present = row < rows
    block_and_head = block_of(compaction_ptr, row, present, BLOCK_SIZE) * KV_HEADS + kv_head
    if CACHE_FORMAT == "none":
        channel = tl.arange(0, VALUE_TILE)
        slots = block_and_head * BLOCK_SIZE + row % BLOCK_SIZE
        inside = present[:, None] & (channel < VALUE_DIM)[None, :]
        value = tl.load(v_cache_ptr + slots[:, None] * VALUE_DIM + channel[None, :], mask=inside, other=0.0)
        value = value.to(tl.float32)
    else:
        value = read_codes(
            v_cache_ptr, block_and_head, row % BLOCK_SIZE, present,
            VALUE_DIM, BLOCK_SIZE, CACHE_FORMAT, CACHE_GROUP, VALUE_TILE,
        )  # fmt: skip
    place = kv_head * LONGEST + row
    attention = tl.load(attention_ptr + place, mask=present, other=0.0)
    tl.store(weighted_ptr + place, attention * tl.sqrt_rn(sum_of_products(value, value, 1)), mask=present)


weigh_attention_budget = Budget("weigh_attention_kernel")
