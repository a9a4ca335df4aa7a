"""llmc::score_leverage: how far each of a request's keys stands out, blended with its own chunk's attention to it.

    leverage[r] = |k[r]·M - offset|²,   score[r] = (1 - kept / tokens) · z(leverage[r]) + z(pooled[r])

Eight launches: the chunk's attention (key_masses.py), times the norms of values (weigh_attention.py), the angles of
positions (key_sketches.py), M and the offset (sketch_moments.py), the leverage and what z needs of each part of rows,
and the scores (blend_scores.py). Keys are read twice in addition to the chunk's, values once.
"""

import math
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import fx

from llmc.codegen.call import Call, arguments_of
from llmc.codegen.triton.kernel import Constant, DeviceLaunch, KernelTemplate
from llmc.codegen.triton.kernels.agreed_sums import sum_of_products
from llmc.codegen.triton.kernels.attention.kv_write import cache_codes, refuse_format
from llmc.codegen.triton.kernels.compaction.blend_scores import blend_scores_kernel, joined_moments
from llmc.codegen.triton.kernels.compaction.key_masses import MAX_DIM, mass_launches, refuse_scoring
from llmc.codegen.triton.kernels.compaction.key_sketches import (
    SKETCH,
    SKETCH_TILE,
    multiplied_keys,
    turning_angles_kernel,
)
from llmc.codegen.triton.kernels.compaction.sketch_moments import (
    part_of_rows,
    sketch_moments_kernel,
    whiten_sketches_kernel,
)
from llmc.codegen.triton.kernels.compaction.weigh_attention import weigh_attention_kernel
from llmc.codegen.triton.kernels.refusals import refuse_dtypes, refuse_ranks
from llmc.codegen.triton.machine_code.budget import Budget
from llmc.graph.refusal import Refusal
from llmc.ops.rotate_heads import rotation_block
from llmc.program.compactor import LONGEST_CHUNK
from llmc.program.launch_arguments import Argument
from llmc.targets import GpuTarget

_PARTS = 16
_ROWS = 16
_SCORES = 256
_VALUES = 16


@triton.jit
def leverages_kernel(
    k_cache_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    compaction_ptr: tl.tensor,
    angles_ptr: tl.tensor,
    matrix_ptr: tl.tensor,
    offset_ptr: tl.tensor,
    weighted_ptr: tl.tensor,
    leverages_ptr: tl.tensor,
    pooled_ptr: tl.tensor,
    moments_ptr: tl.tensor,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    SPREAD_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CACHE_FORMAT: tl.constexpr,
    CACHE_GROUP: tl.constexpr,
    SINKS: tl.constexpr,
    RECENT: tl.constexpr,
    LONGEST: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Program (s, h): part s of head h's rows. Grid: (PARTS, KV_HEADS). Nothing is done where all rows stay.

    pooled: weighted averaged over three neighbours. Both [KV_HEADS, LONGEST], as leverages. moments: [4, KV_HEADS,
    PARTS], mean and sum of squares about it of the part's leverages, then of its pooled rows.
    """
    rows = tl.load(compaction_ptr)
    if tl.load(compaction_ptr + 1) >= rows:
        return
    kv_head = tl.program_id(1)
    matrix_ptr += kv_head * HEAD_DIM * SKETCH
    offset = tl.load(offset_ptr + kv_head * SKETCH_TILE + tl.arange(0, SKETCH_TILE))
    start, end = part_of_rows(compaction_ptr, tl.program_id(0), SINKS, RECENT, PARTS, ROWS)
    zero = tl.full([], 0.0, tl.float32)
    means, squares = (zero, zero), (zero, zero)
    for tile in tl.range(start, end, ROWS):
        row = tile + tl.arange(0, ROWS)
        present = row < end
        y = multiplied_keys(
            k_cache_ptr, positions_ptr, compaction_ptr, matrix_ptr, angles_ptr, row, present, kv_head,
            KV_HEADS, HEAD_DIM, HALF, INTERLEAVED, SPREAD_BLOCK, BLOCK_SIZE, CACHE_FORMAT, CACHE_GROUP,
        )  # fmt: skip
        y -= offset[None, :]
        leverage = sum_of_products(y, y, 1)
        pooled = tl.zeros([ROWS], tl.float32)
        for i in tl.static_range(-1, 2):
            at = row + i
            inside = (at >= SINKS) & (at < rows - RECENT)
            pooled += tl.load(weighted_ptr + kv_head * LONGEST + at, mask=inside, other=0.0)
        pooled = pooled / 3.0
        tl.store(leverages_ptr + kv_head * LONGEST + row, leverage, mask=present)
        tl.store(pooled_ptr + kv_head * LONGEST + row, pooled, mask=present)
        done = (tile - start).to(tl.float32)
        of_leverage = joined_moments(means[0], squares[0], done, leverage, present)
        of_pooled = joined_moments(means[1], squares[1], done, pooled, present)
        means, squares = (of_leverage[0], of_pooled[0]), (of_leverage[1], of_pooled[1])
    place = kv_head * PARTS + tl.program_id(0)
    for i in tl.static_range(2):
        tl.store(moments_ptr + 2 * i * KV_HEADS * PARTS + place, means[i])
        tl.store(moments_ptr + (2 * i + 1) * KV_HEADS * PARTS + place, squares[i])


def supports(node: fx.Node, target: GpuTarget) -> Refusal | None:
    """As refuse_scoring, and values likewise."""
    found, given = refuse_scoring(node, target) or refuse_ranks(node, v_cache=(4,)), arguments_of(node)
    if found is not None:
        return found
    if given["value_dim"] > MAX_DIM:
        return Refusal(f"values have {given['value_dim']} channels; the kernel takes {MAX_DIM} at most", node)
    if given["cache_format"] is None:
        return refuse_dtypes(node, "v_cache")
    return refuse_format(node, given["cache_format"], given["value_dim"])


def candidates(call: Call, target: GpuTarget) -> tuple[DeviceLaunch, ...]:
    (kv_heads, block_size, _), head_dim = call.shape("k_cache")[-3:], 2 * call.shape("q_first")[-1]
    longest, value_dim = int(call.plain("longest")), int(call.plain("value_dim"))
    sinks, tile = int(call.plain("sinks")), int(SKETCH_TILE.value)
    scores, attention, new_positions = (call.result(index).pointer for index in range(3))

    def room(name: str, *sizes: int) -> dict[str, Argument]:
        return {f"{name}_ptr": call.workspace(name, 1, kv_heads * math.prod(sizes), torch.float32).pointer}

    weighted, pooled = room("weighted", longest), room("pooled", longest)
    moments = room("moments", 4, _PARTS)
    of_parts = room("means", _PARTS, tile) | room("products", _PARTS, tile, tile)
    whitened = room("matrix", head_dim, int(SKETCH.value)) | room("offset", tile)
    compaction = {"compaction_ptr": call.vector("compaction")}
    numbers: dict[str, Argument] = {"positions_ptr": call.cache("positions"), **compaction}
    half = 0 if call.plain("inv_freq") is None else call.shape("inv_freq")[0]
    angles: dict[str, Argument] = {"angles_ptr": None}
    if half:
        angles = {"angles_ptr": call.workspace("angles", 1, longest * 2 * half, torch.float32).pointer}
    keys = {"k_cache_ptr": call.cache("k_cache"), **angles, **numbers}
    sketch = {"sketch_ptr": call.vector("sketch")}

    parts: dict[str, Constant] = {"SINKS": sinks, "RECENT": call.plain("recent"), "PARTS": _PARTS, "ROWS": _ROWS}
    cache: dict[str, Constant] = {"KV_HEADS": kv_heads, "BLOCK_SIZE": block_size}
    table: dict[str, Constant] = {"LONGEST": longest}
    head: dict[str, Constant] = {"HEAD_DIM": head_dim}
    codes = cache_codes(call)
    read: dict[str, Constant] = {
        **parts,
        **cache,
        **head,
        "HALF": half,
        "INTERLEAVED": call.plain("interleaved"),
        "SPREAD_BLOCK": rotation_block(head_dim) if call.plain("is_spread") else 0,
        **codes,
    }
    parted = (str(_PARTS), str(kv_heads))
    weigh = DeviceLaunch(
        weigh_attention_kernel,
        {"v_cache_ptr": call.cache("v_cache"), **compaction, "attention_ptr": attention, **weighted},
        {
            **cache,
            **table,
            **codes,
            "VALUE_DIM": value_dim,
            "VALUE_TILE": max(16, triton.next_power_of_2(value_dim)),
            "VALUES": _VALUES,
        },
        (str(triton.cdiv(longest, _VALUES)), str(kv_heads)),
    )
    collect = DeviceLaunch(
        sketch_moments_kernel,
        {**keys, **sketch, **of_parts},
        read,
        parted,
        num_stages=1,
    )
    whiten = DeviceLaunch(
        whiten_sketches_kernel,
        {**compaction, **sketch, **of_parts, **whitened},
        {**parts, **head, "DIM_TILE": max(16, triton.next_power_of_2(head_dim))},
        (str(kv_heads),),
        num_warps=8,
        num_stages=1,
    )
    measure = DeviceLaunch(
        leverages_kernel,
        {**keys, **whitened, **weighted, "leverages_ptr": scores, **pooled, **moments},
        {**read, **table},
        parted,
        num_warps=8,
        num_stages=1,
    )
    blend = DeviceLaunch(
        blend_scores_kernel,
        {**numbers, **pooled, **moments, "scores_ptr": scores, "new_positions_ptr": new_positions},
        {**parts, **cache, **table, "MOMENTS": triton.next_power_of_2(kv_heads * _PARTS), "SCORES": _SCORES},
        (str(triton.cdiv(longest, _SCORES)), str(kv_heads)),
    )
    bounds, masses = mass_launches(call, attention, sums="attention", sinks=sinks, most_queries=LONGEST_CHUNK)
    turn = DeviceLaunch(
        turning_angles_kernel,
        {**compaction, "inv_freq_ptr": call.vector("inv_freq"), **angles},
        {"HALF": half, "PAIR_TILE": triton.next_power_of_2(half)},
        (str(longest),),
        num_warps=1,
    )
    turns = (turn,) if half else ()
    return (replace(bounds, then=(masses, weigh, *turns, collect, whiten, measure, blend)),)


score_leverage = KernelTemplate(torch.ops.llmc.score_leverage.default, supports, candidates)

leverages_budget = Budget("leverages_kernel")
