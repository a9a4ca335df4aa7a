"""llmc::rope_kv_write: turn q and k by the position's angle, write k and v to their slots of the cache.

Memory-bound: moves 2·T·(H + KV)·D + 2·T·KV·Dv elements and T·rotary fp32 angles, where three launches would read and
write k twice more. A program takes a few heads of one token: queries, or keys, or values, by its number. Queries may be
turned in place: a program reads every pair before it writes it and touches no other program's heads.
"""

import torch
import triton
import triton.language as tl
from torch import fx

from llmc.codegen.call import Call
from llmc.codegen.triton.kernel import DeviceLaunch, KernelTemplate, named_arguments, rows
from llmc.codegen.triton.kernels.attention import kv_write as kv_write_kernels
from llmc.codegen.triton.kernels.attention.kv_write import (
    cache_constants,
    caches,
    copy_heads,
    pair_codes,
    slot_rows,
)
from llmc.codegen.triton.kernels.attention.kv_write_codes import code_launch, code_write_kernel
from llmc.codegen.triton.kernels.refusals import refuse_dtypes, refuse_ranks
from llmc.codegen.triton.kernels.rows.rope import rope_kernel, rotation_constants, turn
from llmc.codegen.triton.machine_code.budget import Budget
from llmc.graph.refusal import Refusal
from llmc.targets import GpuTarget


@triton.jit
def rope_kv_write_kernel(
    q_ptr: tl.tensor,
    q_row_stride: int,
    k_ptr: tl.tensor,
    k_row_stride: int,
    v_ptr: tl.tensor,
    v_row_stride: int,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    k_cache_ptr: tl.tensor,
    v_cache_ptr: tl.tensor,
    slot_mapping_ptr: tl.tensor,
    y_ptr: tl.tensor,
    y_row_stride: int,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
) -> None:
    """Program (t, j): the j-th HEAD_BLOCK heads of token t's queries, then of its keys, then of its values."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    Q_PARTS: tl.constexpr = (HEADS + HEAD_BLOCK - 1) // HEAD_BLOCK
    KV_PARTS: tl.constexpr = (KV_HEADS + HEAD_BLOCK - 1) // HEAD_BLOCK
    lane = tl.arange(0, HEAD_BLOCK)
    if part < Q_PARTS:
        head = part * HEAD_BLOCK + lane
        source = q_ptr + token * q_row_stride + head[:, None] * HEAD_DIM
        destination = y_ptr + token * y_row_stride + head[:, None] * HEAD_DIM
        is_head = (head < HEADS)[:, None]
        turn(source, destination, is_head, token, cos_ptr, sin_ptr, HEAD_DIM, HALF, INTERLEAVED)
    else:
        slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
        if part < Q_PARTS + KV_PARTS:
            head = (part - Q_PARTS) * HEAD_BLOCK + lane
            source = k_ptr + token * k_row_stride + head[:, None] * HEAD_DIM
            destination = k_cache_ptr + slot_rows(slot, head, KV_HEADS, BLOCK_SIZE)[:, None] * HEAD_DIM
            is_head = (head < KV_HEADS)[:, None]
            turn(source, destination, is_head, token, cos_ptr, sin_ptr, HEAD_DIM, HALF, INTERLEAVED)
        else:
            head = (part - Q_PARTS - KV_PARTS) * HEAD_BLOCK + lane
            position = slot_rows(slot, head, KV_HEADS, BLOCK_SIZE)
            DIM_BLOCK: tl.constexpr = triton.next_power_of_2(max(HEAD_DIM, VALUE_DIM))
            copy_heads(v_ptr + token * v_row_stride, v_cache_ptr, head, position, KV_HEADS, VALUE_DIM, DIM_BLOCK)


def supports(node: fx.Node, target: GpuTarget) -> Refusal | None:
    """q, k, v: [tokens, heads, dim] of one float dtype; the caches' may be another."""
    found = refuse_dtypes(node, "q", "k", "v") or refuse_ranks(node, q=(3,))
    return found or kv_write_kernels.supports(node, target)


def candidates(call: Call, target: GpuTarget) -> tuple[DeviceLaunch, ...]:
    heads, head_dim = call.shape("q")
    (half,) = call.shape("cos")
    turned = rotation_constants(heads, head_dim, half, call.plain("interleaved"))
    if call.plain("cache_format") is not None:
        return (_coded(call, turned),)
    constants = cache_constants(call) | turned
    block = constants["HEAD_BLOCK"]
    parts = triton.cdiv(heads, block) + 2 * triton.cdiv(constants["KV_HEADS"], block)
    arguments = named_arguments(rope_kv_write_kernel, call, **caches(call))
    grid = (str(call.count("q")), str(parts))
    return (DeviceLaunch(rope_kv_write_kernel, arguments, constants, grid),)


def _coded(call: Call, turned: dict[str, int]) -> DeviceLaunch:
    """Queries are turned in a launch of their own where keys and values become codes."""
    constants = {**pair_codes(call), "HALF": turned["HALF"], "INTERLEAVED": turned["INTERLEAVED"]}
    arguments = named_arguments(code_write_kernel, call, **caches(call))
    return DeviceLaunch(
        rope_kernel,
        named_arguments(rope_kernel, call, **rows("x", call.rows("q"))),
        turned,
        (str(call.count("q")), str(triton.cdiv(turned["HEADS"], turned["HEAD_BLOCK"]))),
        then=(code_launch(call, arguments, cache_constants(call), constants),),
    )


rope_kv_write = KernelTemplate(torch.ops.llmc.rope_kv_write.default, supports, candidates, in_place=(("q", 0),))

rope_kv_write_budget = Budget("rope_kv_write_kernel")
