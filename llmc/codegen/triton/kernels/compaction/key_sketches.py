"""Keys before their rotation, multiplied with a matrix of SKETCH columns (llmc/ops/score_leverage.py).

    x[r, i] = Σ_c k[r, c] · (cos[r, c] · M[c, i] + sin[r, c] · M'[c, i]),   M'[c] = ∓M[the other channel of c's pair]

Turning a key back and multiplying it are one sum, so no channel is exchanged with its pair's other one. A few channels
are read at a time, because products in fp32 hold both factors in registers.
"""

import triton
import triton.language as tl

from llmc.codegen.triton.kernels.compaction.compaction_numbers import block_of
from llmc.codegen.triton.kernels.compaction.key_channels import CHANNELS, key_channels
from llmc.codegen.triton.machine_code.budget import Budget

# SKETCH of llmc/ops/score_leverage.py, and the power of two above it.
SKETCH = tl.constexpr(48)
SKETCH_TILE = tl.constexpr(64)


@triton.jit
def row_positions(
    positions_ptr: tl.tensor,
    compaction_ptr: tl.tensor,
    row: tl.tensor,
    kv_head: tl.tensor,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
) -> tl.tensor:
    """The positions of rows, fp32: stored ones before the queries' rows, and from there on those that follow."""
    before = tl.load(compaction_ptr) - tl.load(compaction_ptr + 2)
    stored = tl.minimum(row, before - 1)
    has_stored = stored >= 0
    block_and_head = block_of(compaction_ptr, stored, has_stored, BLOCK_SIZE) * KV_HEADS + kv_head
    position = tl.load(positions_ptr + block_and_head * BLOCK_SIZE + stored % BLOCK_SIZE, mask=has_stored, other=-1.0)
    return position + tl.maximum(row - (before - 1), 0).to(tl.float32)


@triton.jit
def turning_angles_kernel(
    compaction_ptr: tl.tensor,
    inv_freq_ptr: tl.tensor,
    angles_ptr: tl.tensor,
    HALF: tl.constexpr,
    PAIR_TILE: tl.constexpr,
) -> None:
    """Program p writes cos and sin of position p's angles, [LONGEST, 2, HALF]. Nothing is done where all rows stay."""
    if tl.load(compaction_ptr + 1) >= tl.load(compaction_ptr):
        return
    position, pair = tl.program_id(0), tl.arange(0, PAIR_TILE)
    inside = pair < HALF
    angle = position.to(tl.float32) * tl.load(inv_freq_ptr + pair, mask=inside, other=0.0)
    angles_ptr += position.to(tl.int64) * (2 * HALF)
    tl.store(angles_ptr + pair, tl.cos(angle), mask=inside)
    tl.store(angles_ptr + HALF + pair, tl.sin(angle), mask=inside)


@triton.jit
def multiplied_keys(
    k_cache_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    compaction_ptr: tl.tensor,
    matrix_ptr: tl.tensor,
    angles_ptr: tl.tensor,
    row: tl.tensor,
    present: tl.tensor,
    kv_head: tl.tensor,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    SPREAD_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CACHE_FORMAT: tl.constexpr,
    CACHE_GROUP: tl.constexpr,
) -> tl.tensor:
    """Keys of rows before their rotation times the matrix [HEAD_DIM, SKETCH], fp32, 0 where absent and from SKETCH on.

    angles: as turning_angles_kernel leaves them. HALF: pairs of channels that were rotated by them. SPREAD_BLOCK:
    channels of the blocks in which rotate_heads has rotated keys after that; 0 for none.
    """
    block_and_head = block_of(compaction_ptr, row, present, BLOCK_SIZE) * KV_HEADS + kv_head
    position = row_positions(positions_ptr, compaction_ptr, row, kv_head, KV_HEADS, BLOCK_SIZE)
    if HALF > 0:
        angles_ptr += position.to(tl.int64)[:, None] * (2 * HALF)
    column = tl.arange(0, SKETCH_TILE)
    found = tl.zeros([row.shape[0], SKETCH_TILE], tl.float32)
    for begin in tl.range(0, HEAD_DIM, CHANNELS):
        channel = begin + tl.arange(0, CHANNELS)
        inside = (channel < HEAD_DIM)[:, None] & (column < SKETCH)[None, :]
        key = key_channels(
            k_cache_ptr, block_and_head, row % BLOCK_SIZE, present, channel,
            HEAD_DIM, SPREAD_BLOCK, BLOCK_SIZE, CACHE_FORMAT, CACHE_GROUP,
        )  # fmt: skip
        matrix = tl.load(matrix_ptr + channel[:, None] * SKETCH + column[None, :], mask=inside, other=0.0)
        if HALF == 0:
            found = tl.dot(key, matrix, found, input_precision="ieee")
        else:
            is_turned = channel < 2 * HALF
            is_second = channel % 2 == 1 if INTERLEAVED else channel >= HALF
            step = 1 if INTERLEAVED else HALF
            pair = channel // 2 if INTERLEAVED else channel % HALF
            has_angle = present[:, None] & is_turned[None, :]
            cos = tl.load(angles_ptr + pair[None, :], mask=has_angle, other=1.0)
            sin = tl.load(angles_ptr + HALF + pair[None, :], mask=has_angle, other=0.0)
            partner = tl.where(is_second, channel - step, channel + step)
            inside = inside & is_turned[:, None]
            turned = tl.load(matrix_ptr + partner[:, None] * SKETCH + column[None, :], mask=inside, other=0.0)
            turned = tl.where(is_second[:, None], turned, -turned)
            found = tl.dot(key * cos, matrix, found, input_precision="ieee")
            found = tl.dot(key * sin, turned, found, input_precision="ieee")
    return found


turning_angles_budget = Budget("turning_angles_kernel")
