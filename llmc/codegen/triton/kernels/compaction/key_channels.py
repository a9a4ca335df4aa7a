"""A few channels of stored keys at a time, as they were before llmc::rotate_heads.

Products in fp32 hold both factors in registers, so keys are not read whole.
"""

import triton
import triton.language as tl

from llmc.codegen.triton.kernels.attention.cache_codes import read_channels

CHANNELS = tl.constexpr(16)


@triton.jit
def key_channels(
    k_cache_ptr: tl.tensor,
    block_and_head: tl.tensor,
    position: tl.tensor,
    present: tl.tensor,
    channel: tl.tensor,
    HEAD_DIM: tl.constexpr,
    SPREAD_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CACHE_FORMAT: tl.constexpr,
    CACHE_GROUP: tl.constexpr,
) -> tl.tensor:
    """Channels of keys, fp32, [rows, CHANNELS], 0 where absent and from HEAD_DIM on.

    block_and_head: block · KV heads + head of each row, int64. channel: [CHANNELS], in any order. SPREAD_BLOCK:
    channels of the blocks in which rotate_heads has rotated keys, which are turned back; 0 for none.
    """
    ROWS: tl.constexpr = position.shape[0]
    if SPREAD_BLOCK == 0:
        found = read_channels(
            k_cache_ptr, block_and_head, position, present, channel[None, :], (channel < HEAD_DIM)[None, :],
            HEAD_DIM, BLOCK_SIZE, CACHE_FORMAT, CACHE_GROUP,
        )  # fmt: skip
        return found.reshape(ROWS, CHANNELS)
    else:
        found = tl.zeros([ROWS, CHANNELS], tl.float32)
        for begin in tl.range(0, HEAD_DIM, CHANNELS):
            source = begin + tl.arange(0, CHANNELS)
            spread = read_channels(
                k_cache_ptr, block_and_head, position, present, source[None, :], (source < HEAD_DIM)[None, :],
                HEAD_DIM, BLOCK_SIZE, CACHE_FORMAT, CACHE_GROUP,
            )  # fmt: skip
            # The signs of a Hadamard matrix: whether i AND j has an odd number of ones.
            odd = source[:, None] & channel[None, :] & (SPREAD_BLOCK - 1)
            for shift in tl.static_range(4):
                odd = odd ^ (odd >> (8 >> shift))
            in_block = (source // SPREAD_BLOCK)[:, None] == (channel // SPREAD_BLOCK)[None, :]
            hadamard = tl.where(in_block, tl.where((odd & 1) == 1, -1.0, 1.0), 0.0)
            found = tl.dot(spread.reshape(ROWS, CHANNELS), hadamard, found, input_precision="ieee")
        return found * (SPREAD_BLOCK**-0.5)
