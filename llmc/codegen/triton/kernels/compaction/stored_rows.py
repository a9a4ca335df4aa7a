"""Device code that moves rows of one head as they are stored, and how a format stores them.

A block stores, for each head, the elements or codes of all positions, then SCALES numbers of 16 bits per position. Rows
move down, so a tile is read whole before any of it is written.
"""

import triton
import triton.language as tl

from llmc.codegen.call import Call
from llmc.formats.cache_format import parse_cache_format


@triton.jit
def move_rows(
    cache_ptr: tl.tensor,
    source_block: tl.tensor,
    source: tl.tensor,
    place_block: tl.tensor,
    place: tl.tensor,
    present: tl.tensor,
    kv_head: tl.tensor,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROW: tl.constexpr,
    SCALES: tl.constexpr,
) -> None:
    """Copy rows of a head: row source % BLOCK_SIZE of each source_block to row place % BLOCK_SIZE of its place_block.

    ROW: elements of a row, or bytes of its codes.
    """
    STRIDE: tl.constexpr = BLOCK_SIZE * (ROW + 2 * SCALES)
    column = tl.arange(0, triton.next_power_of_2(ROW))
    inside = present[:, None] & (column < ROW)[None, :]
    read = cache_ptr + (source_block * KV_HEADS + kv_head) * STRIDE
    written = cache_ptr + (place_block * KV_HEADS + kv_head) * STRIDE
    row, to = source % BLOCK_SIZE, place % BLOCK_SIZE
    values = tl.load((read + row * ROW)[:, None] + column[None, :], mask=inside)
    if SCALES > 0:
        number = tl.arange(0, triton.next_power_of_2(SCALES))
        is_number = present[:, None] & (number < SCALES)[None, :]
        numbers = (read + BLOCK_SIZE * ROW).to(tl.pointer_type(tl.uint16)) + row
        scales = tl.load(numbers[:, None] + number[None, :] * BLOCK_SIZE, mask=is_number)
    tl.debug_barrier()
    tl.store((written + to * ROW)[:, None] + column[None, :], values, mask=inside)
    if SCALES > 0:
        numbers = (written + BLOCK_SIZE * ROW).to(tl.pointer_type(tl.uint16)) + to
        tl.store(numbers[:, None] + number[None, :] * BLOCK_SIZE, scales, mask=is_number)


def stored_row(call: Call, channels: int) -> tuple[int, int]:
    """ROW and SCALES of a row of `channels` channels, in the format of the op's caches."""
    text = call.plain("cache_format")
    if text is None:
        return channels, 0
    format = parse_cache_format(text)
    codes = format.code_bytes(channels)
    return codes, (format.position_bytes(channels) - codes) // 2


def stored_constants(call: Call) -> dict[str, int]:
    """Constants of both caches: KV_HEADS, BLOCK_SIZE, and of a key's row and of a value's ROW and SCALES."""
    kv_heads, block_size, _ = call.shape("k_cache")[-3:]
    key, value = (stored_row(call, call.plain(name)) for name in ("head_dim", "value_dim"))
    return {
        "KV_HEADS": kv_heads,
        "BLOCK_SIZE": block_size,
        "KEY_ROW": key[0],
        "KEY_SCALES": key[1],
        "VALUE_ROW": value[0],
        "VALUE_SCALES": value[1],
    }


def row_tile(*widths: int) -> int:
    """Rows that a program moves together."""
    return int(max(1, min(64, 4096 // triton.next_power_of_2(max(widths)))))
