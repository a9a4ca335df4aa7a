"""llmc::kv_write and the keys of llmc::rope_kv_write into a cache of codes: turn, round to codes, put in place.

Memory-bound: reads T·KV·(D + Dv) elements and writes one code each. A program takes some heads of a token's k or v.
"""

from collections.abc import Mapping

import triton
import triton.language as tl

from llmc.codegen.call import Call
from llmc.codegen.triton.kernel import Constant, DeviceLaunch
from llmc.codegen.triton.kernels.attention.cache_codes import write_codes
from llmc.program.launch_arguments import Argument

_ELEMENTS_PER_PROGRAM = 1024


@triton.jit
def code_write_kernel(
    k_ptr: tl.tensor,
    k_row_stride: int,
    v_ptr: tl.tensor,
    v_row_stride: int,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    k_cache_ptr: tl.tensor,
    v_cache_ptr: tl.tensor,
    slot_mapping_ptr: tl.tensor,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CACHE_FORMAT: tl.constexpr,
    CACHE_GROUP: tl.constexpr,
    VALUE_FORMAT: tl.constexpr,
    VALUE_GROUP: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
) -> None:
    """Program (t, j): the j-th HEAD_BLOCK heads of token t's keys, then of its values.

    HALF: pairs of channels of a key that are turned, 0 for none. HALF_BLOCK: at least half of a head.
    """
    token = tl.program_id(0).to(tl.int64)
    PARTS: tl.constexpr = (KV_HEADS + HEAD_BLOCK - 1) // HEAD_BLOCK
    part = tl.program_id(1)
    head = part % PARTS * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    if part < PARTS:
        keys = _turned(
            k_ptr + token * k_row_stride, head, token, cos_ptr, sin_ptr,
            KV_HEADS, HEAD_DIM, HALF, INTERLEAVED, HALF_BLOCK,
        )  # fmt: skip
        write_codes(
            keys, k_cache_ptr, slot, head,
            KV_HEADS, HEAD_DIM, BLOCK_SIZE, CACHE_FORMAT, CACHE_GROUP, HEAD_BLOCK, HALF_BLOCK,
        )  # fmt: skip
    else:
        values = _turned(
            v_ptr + token * v_row_stride, head, token, None, None,
            KV_HEADS, VALUE_DIM, 0, False, HALF_BLOCK,
        )  # fmt: skip
        write_codes(
            values, v_cache_ptr, slot, head,
            KV_HEADS, VALUE_DIM, BLOCK_SIZE, VALUE_FORMAT, VALUE_GROUP, HEAD_BLOCK, HALF_BLOCK,
        )  # fmt: skip


@triton.jit
def _turned(
    row_ptr: tl.tensor,
    head: tl.tensor,
    token: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
) -> tl.tensor:
    """Heads of a token, [heads, 2, HALF_BLOCK], fp32 as rounded to their own dtype, turned by the token's angles."""
    lane = tl.arange(0, HALF_BLOCK)
    channel = tl.arange(0, 2)[:, None] * (DIM // 2) + lane[None, :]
    source = row_ptr + head[:, None, None] * DIM
    inside = (head < KV_HEADS)[:, None, None] & (lane < DIM // 2)[None, None, :]
    x = tl.load(source + channel[None, :, :], mask=inside, other=0.0).to(tl.float32)
    if HALF > 0:
        is_turned = channel < 2 * HALF
        is_second = channel % 2 == 1 if INTERLEAVED else channel >= HALF
        pair = channel // 2 if INTERLEAVED else channel % HALF
        step = 1 if INTERLEAVED else HALF
        partner = tl.where(is_second, channel - step, channel + step)
        cos = tl.load(cos_ptr + token * HALF + pair, mask=is_turned, other=1.0)
        sin = tl.load(sin_ptr + token * HALF + pair, mask=is_turned, other=0.0)
        other = tl.load(source + partner[None, :, :], mask=inside & is_turned[None, :, :], other=0.0).to(tl.float32)
        x = x * cos[None, :, :] + other * tl.where(is_second, sin, -sin)[None, :, :]
        x = x.to(row_ptr.dtype.element_ty).to(tl.float32)
    return x


def code_launch(
    call: Call, arguments: Mapping[str, Argument], slot: Mapping[str, int], constants: Mapping[str, Constant]
) -> DeviceLaunch:
    """The launch. slot: constants for a slot's shape. constants: for the caches' format and the rotation of keys."""
    heads, half_block = slot["KV_HEADS"], triton.next_power_of_2(max(slot["HEAD_DIM"], slot["VALUE_DIM"]) // 2)
    block = min(triton.next_power_of_2(heads), max(1, _ELEMENTS_PER_PROGRAM // (2 * half_block)))
    return DeviceLaunch(
        code_write_kernel,
        arguments,
        {**slot, **constants, "HEAD_BLOCK": block, "HALF_BLOCK": half_block},
        (str(call.count("k")), str(2 * triton.cdiv(heads, block))),
    )
