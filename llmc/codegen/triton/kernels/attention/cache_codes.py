"""Device code for quantized KV caches (llmc/ops/cache_codes.py): one head's channels to codes and back, in registers.

A block stores, for each head, the codes of all positions, then the scales and for int4 the minima, in bf16 by group and
position. Rounding to bf16 is done on the bits, to nearest even, so that the interpreter does the same.
"""

import triton
import triton.language as tl

from llmc.codegen.triton.kernels.products.weight_codes import e4m3_codes, e4m3_values, nearest_integers


@triton.jit
def write_codes(
    values: tl.tensor,
    cache_ptr: tl.tensor,
    slot: tl.tensor,
    head: tl.tensor,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
) -> None:
    """Quantize values: [HEAD_BLOCK, 2, HALF_BLOCK], fp32, the two halves of each head, into a slot's place.

    slot: one for all heads, or one for each. head: [HEAD_BLOCK]; from KV_HEADS on nothing is written. GROUP: channels
    with a scale, 0 for all of a head's; otherwise a power of two that divides half of a head.
    """
    HALF: tl.constexpr = DIM // 2
    # Groups in a half of the tile, and of a head.
    COUNT: tl.constexpr = 1 if GROUP == 0 else HALF_BLOCK // GROUP
    GROUPS: tl.constexpr = 1 if GROUP == 0 else DIM // GROUP
    WIDTH: tl.constexpr = HALF_BLOCK if GROUP == 0 else GROUP
    CODE_BYTES: tl.constexpr = HALF if FORMAT == "int4" else DIM
    POSITION_BYTES: tl.constexpr = CODE_BYTES + GROUPS * (4 if FORMAT == "int4" else 2)
    lane = tl.arange(0, HALF_BLOCK)
    inside = (lane < HALF).reshape(1, 1, COUNT, WIDTH)
    grouped = values.reshape(HEAD_BLOCK, 2, COUNT, WIDTH)
    # Floating-point minimum and maximum may ignore NaN.
    nans = tl.max((inside & (grouped != grouped)).to(tl.int32), axis=3, keep_dims=True)
    if GROUP == 0:
        nans = tl.max(nans, axis=1, keep_dims=True)
    if FORMAT == "int4":
        low = tl.min(tl.where(inside, grouped, float("inf")), axis=3, keep_dims=True)
        high = tl.max(tl.where(inside, grouped, float("-inf")), axis=3, keep_dims=True)
        if GROUP == 0:
            low, high = tl.min(low, axis=1, keep_dims=True), tl.max(high, axis=1, keep_dims=True)
        low_bits = _bf16_bits(low)
        low = _bf16_values(low_bits)
        scale_bits = _scale_bits(tl.div_rn(high - low, 15.0 + tl.zeros_like(high)), nans)
        scaled = tl.div_rn(grouped - low, _bf16_values(scale_bits) + tl.zeros_like(grouped))
        codes = nearest_integers(tl.minimum(tl.maximum(scaled, 0.0), 15.0))
    else:
        LARGEST: tl.constexpr = 448.0 if FORMAT == "fp8" else 127.0
        high = tl.max(tl.where(inside, tl.abs(grouped), 0.0), axis=3, keep_dims=True)
        if GROUP == 0:
            high = tl.max(high, axis=1, keep_dims=True)
        low_bits = _bf16_bits(high)
        scale_bits = _scale_bits(tl.div_rn(high, LARGEST + tl.zeros_like(high)), nans)
        scaled = tl.div_rn(grouped, _bf16_values(scale_bits) + tl.zeros_like(grouped))
        scaled = tl.minimum(tl.maximum(scaled, -LARGEST), LARGEST)
        codes = e4m3_codes(scaled) if FORMAT == "fp8" else nearest_integers(scaled)
    codes = codes.reshape(HEAD_BLOCK, 2, HALF_BLOCK)
    position = slot % BLOCK_SIZE + head * 0
    base = cache_ptr + (slot // BLOCK_SIZE * KV_HEADS + head) * (BLOCK_SIZE * POSITION_BYTES)
    half = tl.arange(0, 2)[None, :, None]
    is_head = head < KV_HEADS
    if FORMAT == "int4":
        bytes = tl.sum(codes << (half * 4), axis=1)
        place = (base + position * CODE_BYTES)[:, None] + lane[None, :]
        tl.store(place, bytes.to(tl.uint8), mask=is_head[:, None] & (lane < HALF)[None, :])
    else:
        place = (base + position * CODE_BYTES)[:, None, None] + half * HALF + lane[None, None, :]
        tl.store(place, (codes & 0xFF).to(tl.uint8), mask=is_head[:, None, None] & (lane < HALF)[None, None, :])
    group = tl.arange(0, 2)[:, None] * (HALF // WIDTH) + tl.arange(0, COUNT)[None, :]
    is_group = (tl.arange(0, COUNT) < HALF // WIDTH)[None, None, :, None]
    if GROUP == 0:
        group = tl.zeros([1, 1], dtype=tl.int32)
        is_group = (group == 0)[None, :, :, None]
    number = (base + BLOCK_SIZE * CODE_BYTES).to(tl.pointer_type(tl.uint16))[:, None, None, None]
    number += group[None, :, :, None] * BLOCK_SIZE + position[:, None, None, None]
    is_group = is_group & is_head[:, None, None, None]
    tl.store(number, scale_bits.to(tl.uint16), mask=is_group)
    if FORMAT == "int4":
        tl.store(number + GROUPS * BLOCK_SIZE, low_bits.to(tl.uint16), mask=is_group)


@triton.jit
def read_codes(
    cache_ptr: tl.tensor,
    block_and_head: tl.tensor,
    position: tl.tensor,
    present: tl.tensor,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    DIM_TILE: tl.constexpr,
) -> tl.tensor:
    """The values of some positions of a head, [positions, DIM_TILE], fp32, zero where absent and past DIM.

    block_and_head: block · KV heads + head, int64.
    """
    COUNT: tl.constexpr = 1 if GROUP == 0 else DIM_TILE // GROUP
    GROUPS: tl.constexpr = 1 if GROUP == 0 else DIM // GROUP
    CODE_BYTES: tl.constexpr = DIM // 2 if FORMAT == "int4" else DIM
    POSITION_BYTES: tl.constexpr = CODE_BYTES + GROUPS * (4 if FORMAT == "int4" else 2)
    dims, group = tl.arange(0, DIM_TILE), tl.arange(0, COUNT)
    base = cache_ptr + block_and_head * (BLOCK_SIZE * POSITION_BYTES)
    row = base + position * CODE_BYTES
    inside = present[:, None] & (dims < DIM)[None, :]
    if FORMAT == "int4":
        HALF: tl.constexpr = DIM // 2
        # Both halves of a head come from the same bytes; the second reading finds them in the L1 cache.
        upper = dims >= HALF
        codes = tl.load(row[:, None] + tl.where(upper, dims - HALF, dims)[None, :], mask=inside, other=0)
        values = ((codes.to(tl.int32) >> tl.where(upper, 4, 0)[None, :]) & 15).to(tl.float32)
    else:
        codes = tl.load(row[:, None] + dims[None, :], mask=inside, other=0)
        signed = codes.to(tl.int8, bitcast=True)
        values = e4m3_values(codes.to(tl.int32)) if FORMAT == "fp8" else signed.to(tl.float32)
    number = (base + BLOCK_SIZE * CODE_BYTES).to(tl.pointer_type(tl.uint16))[:, None]
    number += group[None, :] * BLOCK_SIZE + position[:, None]
    is_group = present[:, None] & (group < GROUPS)[None, :]
    scales = _bf16_values(tl.load(number, mask=is_group, other=0).to(tl.int32))[:, :, None]
    grouped = values.reshape(position.shape[0], COUNT, DIM_TILE // COUNT) * scales
    if FORMAT == "int4":
        minima = tl.load(number + GROUPS * BLOCK_SIZE, mask=is_group, other=0).to(tl.int32)
        grouped += _bf16_values(minima)[:, :, None]
        return tl.where((dims < DIM)[None, :], grouped.reshape(values.shape), 0.0)
    else:
        return grouped.reshape(values.shape)


@triton.jit
def read_channels(
    cache_ptr: tl.tensor,
    block_and_head: tl.tensor,
    position: tl.tensor,
    present: tl.tensor,
    channel: tl.tensor,
    inside: tl.tensor,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
) -> tl.tensor:
    """The values of channels in any order, [positions, *channels], fp32, zero where absent and not inside.

    block_and_head: block · KV heads + head, int64. channel, inside: [2, channels]. FORMAT: of codes, or "none".
    """
    mask = present[:, None, None] & inside[None, :, :]
    if FORMAT == "none":
        row = cache_ptr + (block_and_head * BLOCK_SIZE + position) * DIM
        return tl.load(row[:, None, None] + channel[None, :, :], mask=mask, other=0.0).to(tl.float32)
    else:
        GROUPS: tl.constexpr = 1 if GROUP == 0 else DIM // GROUP
        CODE_BYTES: tl.constexpr = DIM // 2 if FORMAT == "int4" else DIM
        POSITION_BYTES: tl.constexpr = CODE_BYTES + GROUPS * (4 if FORMAT == "int4" else 2)
        base = cache_ptr + block_and_head * (BLOCK_SIZE * POSITION_BYTES)
        row = (base + position * CODE_BYTES)[:, None, None]
        if FORMAT == "int4":
            HALF: tl.constexpr = DIM // 2
            upper = channel >= HALF
            bytes = tl.load(row + tl.where(upper, channel - HALF, channel)[None, :, :], mask=mask, other=0)
            values = ((bytes.to(tl.int32) >> tl.where(upper, 4, 0)[None, :, :]) & 15).to(tl.float32)
        else:
            codes = tl.load(row + channel[None, :, :], mask=mask, other=0)
            signed = codes.to(tl.int8, bitcast=True)
            values = e4m3_values(codes.to(tl.int32)) if FORMAT == "fp8" else signed.to(tl.float32)
        group = channel * 0 if GROUP == 0 else channel // GROUP
        number = (base + BLOCK_SIZE * CODE_BYTES).to(tl.pointer_type(tl.uint16)) + position
        number = number[:, None, None] + group[None, :, :] * BLOCK_SIZE
        values = values * _bf16_values(tl.load(number, mask=mask, other=0).to(tl.int32))
        if FORMAT == "int4":
            values += _bf16_values(tl.load(number + GROUPS * BLOCK_SIZE, mask=mask, other=0).to(tl.int32))
        return values


@triton.jit
def _scale_bits(scales: tl.tensor, nans: tl.tensor) -> tl.tensor:
    """bf16 bits in int32: 1.0 where the scale does not round to a positive number, NaN where nans is not 0."""
    bits = _bf16_bits(scales)
    positive = tl.where((bits > 0) & (bits < 0x8000), bits, 0x3F80)
    return tl.where(nans > 0, 0x7FC0, positive)


@triton.jit
def _bf16_bits(values: tl.tensor) -> tl.tensor:
    """The nearest bf16's bits, ties to even, in int32."""
    bits = values.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF


@triton.jit
def _bf16_values(bits: tl.tensor) -> tl.tensor:
    return (bits << 16).to(tl.float32, bitcast=True)
