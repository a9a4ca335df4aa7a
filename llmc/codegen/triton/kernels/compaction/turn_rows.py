"""llmc::turn_rows: move a request's latest rows up, and turn their keys back by the rows that they pass.

Memory-bound: reads and writes the kept rows once. Rows move in order, a tile at a time, so that none is written before
it is read.
"""

import torch
import triton
import triton.language as tl
from torch import fx

from llmc.codegen.call import Call, arguments_of
from llmc.codegen.triton.kernel import DeviceLaunch, KernelTemplate
from llmc.codegen.triton.kernels.attention.cache_codes import read_channels, write_codes
from llmc.codegen.triton.kernels.attention.kv_write import cache_codes, caches, refuse_format
from llmc.codegen.triton.kernels.compaction.compact_kv import refuse_stored
from llmc.codegen.triton.kernels.compaction.compaction_numbers import block_of, place_of
from llmc.codegen.triton.kernels.compaction.stored_rows import move_rows, row_tile, stored_constants
from llmc.codegen.triton.machine_code.budget import Budget
from llmc.graph.refusal import Refusal
from llmc.targets import GpuTarget

_MAX_DIM = 256


@triton.jit
def turn_rows_kernel(
    k_cache_ptr: tl.tensor,
    v_cache_ptr: tl.tensor,
    compaction_ptr: tl.tensor,
    inv_freq_ptr: tl.tensor,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEY_ROW: tl.constexpr,
    KEY_SCALES: tl.constexpr,
    VALUE_ROW: tl.constexpr,
    VALUE_SCALES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    SINKS: tl.constexpr,
    CACHE_FORMAT: tl.constexpr,
    CACHE_GROUP: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
) -> None:
    """Program (h, 0) turns head h's keys, KEYS at a time, (h, 1) moves its values, ROWS at a time. Grid: (KV_HEADS, 2).

    HALF: pairs of channels that are rotated. HALF_BLOCK: at least half of a head.
    """
    kv_head = tl.program_id(0)
    kept = tl.load(compaction_ptr + 1)
    shift = tl.load(compaction_ptr) - kept
    if tl.program_id(1) == 0:
        for tile in tl.range(0, SINKS, ROWS):
            to = tile + tl.arange(0, ROWS)
            present = to < SINKS
            source = block_of(compaction_ptr, to, present, BLOCK_SIZE)
            place = place_of(compaction_ptr, to, present, BLOCK_SIZE)
            move_rows(k_cache_ptr, source, to, place, to, present, kv_head, KV_HEADS, BLOCK_SIZE, KEY_ROW, KEY_SCALES)
        for tile in tl.range(SINKS, kept, KEYS):
            to = tile + tl.arange(0, KEYS)
            _turn_keys(
                k_cache_ptr, compaction_ptr, inv_freq_ptr, to, to < kept, shift, kv_head,
                KV_HEADS, BLOCK_SIZE, HEAD_DIM, HALF, INTERLEAVED, CACHE_FORMAT, CACHE_GROUP, HALF_BLOCK,
            )  # fmt: skip
    else:
        for tile in tl.range(0, kept, ROWS):
            to = tile + tl.arange(0, ROWS)
            present = to < kept
            row = tl.where(to < SINKS, to, to + shift)
            source = block_of(compaction_ptr, row, present, BLOCK_SIZE)
            place = place_of(compaction_ptr, to, present, BLOCK_SIZE)
            move_rows(
                v_cache_ptr, source, row, place, to, present, kv_head, KV_HEADS, BLOCK_SIZE, VALUE_ROW, VALUE_SCALES
            )


@triton.jit
def _turn_keys(
    k_cache_ptr: tl.tensor,
    compaction_ptr: tl.tensor,
    inv_freq_ptr: tl.tensor,
    to: tl.tensor,
    present: tl.tensor,
    shift: tl.tensor,
    kv_head: tl.tensor,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    CACHE_FORMAT: tl.constexpr,
    CACHE_GROUP: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
) -> None:
    """Turn the keys of rows `shift` behind `to`, and write them there."""
    lane = tl.arange(0, HALF_BLOCK)
    channel = tl.arange(0, 2)[:, None] * (HEAD_DIM // 2) + lane[None, :]
    is_channel = (lane < HEAD_DIM // 2)[None, :]
    is_turned = is_channel & (channel < 2 * HALF)
    is_second = channel % 2 == 1 if INTERLEAVED else channel >= HALF
    pair = channel // 2 if INTERLEAVED else channel % HALF
    step = 1 if INTERLEAVED else HALF
    partner = tl.where(is_second, channel - step, channel + step)
    angle = -shift.to(tl.float32) * tl.load(inv_freq_ptr + pair, mask=is_turned, other=0.0)
    cos, sin = tl.cos(angle), tl.sin(angle)
    row = to + shift
    block_and_head = block_of(compaction_ptr, row, present, BLOCK_SIZE) * KV_HEADS + kv_head
    at = row % BLOCK_SIZE
    key = read_channels(
        k_cache_ptr, block_and_head, at, present, channel, is_channel, HEAD_DIM, BLOCK_SIZE, CACHE_FORMAT, CACHE_GROUP
    )
    other = read_channels(
        k_cache_ptr, block_and_head, at, present, partner, is_turned, HEAD_DIM, BLOCK_SIZE, CACHE_FORMAT, CACHE_GROUP
    )
    turned = key * cos[None, :, :] + other * tl.where(is_second, sin, -sin)[None, :, :]
    tl.debug_barrier()
    place = place_of(compaction_ptr, to, present, BLOCK_SIZE)
    if CACHE_FORMAT == "none":
        slot = (place * KV_HEADS + kv_head) * BLOCK_SIZE + to % BLOCK_SIZE
        written = k_cache_ptr + slot[:, None, None] * HEAD_DIM + channel[None, :, :]
        mask = present[:, None, None] & is_channel[None, :, :]
        tl.store(written, turned.to(k_cache_ptr.dtype.element_ty), mask=mask)
    else:
        # Heads from KV_HEADS on are not written.
        head = tl.where(present, kv_head, KV_HEADS)
        write_codes(
            turned, k_cache_ptr, place * BLOCK_SIZE + to % BLOCK_SIZE, head,
            KV_HEADS, HEAD_DIM, BLOCK_SIZE, CACHE_FORMAT, CACHE_GROUP, to.shape[0], HALF_BLOCK,
        )  # fmt: skip


def supports(node: fx.Node, target: GpuTarget) -> Refusal | None:
    """Refuse rows that cannot be moved, codes whose groups do not divide halves of keys, and more than 256 channels."""
    given, found = arguments_of(node), refuse_stored(node, target)
    if found is not None:
        return found
    if given["head_dim"] > _MAX_DIM:
        return Refusal(f"heads have {given['head_dim']} channels; the kernel takes {_MAX_DIM} at most", node)
    if given["head_dim"] % 2:
        return Refusal(f"a head of {given['head_dim']} channels has no halves; the kernel turns two halves", node)
    format = given["cache_format"]
    return None if format is None else refuse_format(node, format, given["head_dim"])


def candidates(call: Call, target: GpuTarget) -> tuple[DeviceLaunch, ...]:
    stored, (half,), head_dim = stored_constants(call), call.shape("inv_freq"), call.plain("head_dim")
    half_block = int(triton.next_power_of_2(head_dim // 2))
    constants = {
        **stored,
        "HEAD_DIM": head_dim,
        "HALF": half,
        "INTERLEAVED": call.plain("interleaved"),
        "SINKS": call.plain("sinks"),
        **cache_codes(call),
        "HALF_BLOCK": half_block,
        "ROWS": row_tile(stored["KEY_ROW"], stored["VALUE_ROW"]),
        "KEYS": max(1, 512 // half_block),
    }
    arguments = {name: call.vector(name.removesuffix("_ptr")) for name in ("compaction_ptr", "inv_freq_ptr")}
    return (DeviceLaunch(turn_rows_kernel, {**caches(call), **arguments}, constants, (str(stored["KV_HEADS"]), "2")),)


turn_rows = KernelTemplate(torch.ops.llmc.turn_rows.default, supports, candidates)

turn_rows_budget = Budget("turn_rows_kernel")
