"""llmc::score_leverage: how far each of a request's keys stands out, blended with its own chunk's attention to it.

    leverage[r] = |k[r]·M - offset|²,   score[r] = (1 - kept / tokens) · z(leverage[r]) + z(pooled[r])

Eight launches: the chunk's attention (key_masses.py), times the norms of values (weigh_attention.py), the angles of
positions (key_sketches.py), M and the offset (sketch_moments.py), the leverage and what z needs of each part of rows,
and the scores (blend_scores.py). Keys are read twice in addition to the chunk's, values once.
"""

import math
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import fx

from llmc.codegen.call import Call, arguments_of
from llmc.codegen.triton.kernel import Constant, DeviceLaunch, KernelTemplate
from llmc.codegen.triton.kernels.agreed_sums import sum_of_products
from llmc.codegen.triton.kernels.attention.kv_write import cache_codes, refuse_format
from llmc.codegen.triton.kernels.compaction.blend_scores import blend_scores_kernel
from llmc.codegen.triton.kernels.compaction.key_masses import MAX_DIM, mass_launches, refuse_scoring
from llmc.codegen.triton.kernels.compaction.key_sketches import (
    SKETCH,
    SKETCH_TILE,
    multiplied_keys,
    turning_angles_kernel,
)
from llmc.codegen.triton.kernels.compaction.row_parts import joined_moments, part_of_rows
from llmc.codegen.triton.kernels.compaction.sketch_moments import sketch_moments_kernel, whiten_sketches_kernel
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
    """Refuse what refuse_scoring refuses, and the same of values."""
    found, given = refuse_scoring(node, target) or refuse_ranks(node, v_cache=(4,)), arguments_of(node)
    if found is not None:
        return found
    if given["value_dim"] > MAX_DIM:
        return Refusal(f"values have {given['value_dim']} channels; the kernel takes {MAX_DIM} at most", node)
    if given["cache_format"] is None:
        return refuse_dtypes(node, "v_cache")
    return refuse_format(node, given["cache_format"], given["value_dim"])


def candidates(call: Call, target: GpuTarget) -> tuple[DeviceLaunch, ...]:
    shared, sinks, attention = _shared(call), int(call.plain("sinks")), call.result(1).pointer
    bounds, masses = mass_launches(call, attention, sums="attention", sinks=sinks, most_queries=LONGEST_CHUNK)
    weigh = _weigh(call, shared)
    return (replace(bounds, then=(masses, weigh, *_turn(call, shared), *_score(call, shared), _blend(call, shared))),)


@dataclass(frozen=True)
class _Shared:
    """Operands and constants that several launches take. half: of channels that positions rotate, 0 for none."""

    compaction: dict[str, Argument]
    angles: dict[str, Argument]
    weighted: dict[str, Argument]
    pooled: dict[str, Argument]
    moments: dict[str, Argument]
    parts: dict[str, Constant]
    cache: dict[str, Constant]
    codes: dict[str, Constant]
    kv_heads: int
    longest: int
    half: int

    @property
    def table(self) -> dict[str, Constant]:
        """The stride of numbers per row."""
        return {"LONGEST": self.longest}


def _room(call: Call, name: str, *sizes: int) -> dict[str, Argument]:
    return {f"{name}_ptr": call.workspace(name, 1, math.prod(sizes), torch.float32).pointer}


def _shared(call: Call) -> _Shared:
    kv_heads, block_size, _ = call.shape("k_cache")[-3:]
    longest, sinks = int(call.plain("longest")), int(call.plain("sinks"))
    half = 0 if call.plain("inv_freq") is None else call.shape("inv_freq")[0]
    return _Shared(
        compaction={"compaction_ptr": call.vector("compaction")},
        angles=_room(call, "angles", longest, 2, half) if half else {"angles_ptr": None},
        weighted=_room(call, "weighted", kv_heads, longest),
        pooled=_room(call, "pooled", kv_heads, longest),
        moments=_room(call, "moments", kv_heads, 4, _PARTS),
        parts={"SINKS": sinks, "RECENT": call.plain("recent"), "PARTS": _PARTS, "ROWS": _ROWS},
        cache={"KV_HEADS": kv_heads, "BLOCK_SIZE": block_size},
        codes=cache_codes(call),
        kv_heads=kv_heads,
        longest=longest,
        half=half,
    )


def _weigh(call: Call, shared: _Shared) -> DeviceLaunch:
    value_dim = int(call.plain("value_dim"))
    attention: dict[str, Argument] = {"attention_ptr": call.result(1).pointer}
    values: dict[str, Constant] = {
        "VALUE_DIM": value_dim,
        "VALUE_TILE": max(16, triton.next_power_of_2(value_dim)),
        "VALUES": _VALUES,
    }
    return DeviceLaunch(
        weigh_attention_kernel,
        {"v_cache_ptr": call.cache("v_cache"), **shared.compaction, **attention, **shared.weighted},
        {**shared.cache, **shared.table, **shared.codes, **values},
        (str(triton.cdiv(shared.longest, _VALUES)), str(shared.kv_heads)),
    )


def _turn(call: Call, shared: _Shared) -> tuple[DeviceLaunch, ...]:
    if not shared.half:
        return ()
    turn = DeviceLaunch(
        turning_angles_kernel,
        {**shared.compaction, "inv_freq_ptr": call.vector("inv_freq"), **shared.angles},
        {"HALF": shared.half, "PAIR_TILE": triton.next_power_of_2(shared.half)},
        (str(shared.longest),),
        num_warps=1,
    )
    return (turn,)


def _score(call: Call, shared: _Shared) -> tuple[DeviceLaunch, ...]:
    head_dim, tile = 2 * call.shape("q_first")[-1], int(SKETCH_TILE.value)
    positions: dict[str, Argument] = {"positions_ptr": call.cache("positions")}
    keys = {"k_cache_ptr": call.cache("k_cache"), **shared.angles, **positions, **shared.compaction}
    sketch = {"sketch_ptr": call.vector("sketch")}
    means, products = (shared.kv_heads, _PARTS, tile), (shared.kv_heads, _PARTS, tile, tile)
    of_parts = _room(call, "means", *means) | _room(call, "products", *products)
    matrix = _room(call, "matrix", shared.kv_heads, head_dim, int(SKETCH.value))
    whitened = matrix | _room(call, "offset", shared.kv_heads, tile)
    head: dict[str, Constant] = {"HEAD_DIM": head_dim}
    read: dict[str, Constant] = {
        **shared.parts,
        **shared.cache,
        **head,
        "HALF": shared.half,
        "INTERLEAVED": call.plain("interleaved"),
        "SPREAD_BLOCK": rotation_block(head_dim) if call.plain("is_spread") else 0,
        **shared.codes,
    }
    parted = (str(_PARTS), str(shared.kv_heads))
    collect = DeviceLaunch(sketch_moments_kernel, {**keys, **sketch, **of_parts}, read, parted, num_stages=1)
    whiten = DeviceLaunch(
        whiten_sketches_kernel,
        {**shared.compaction, **sketch, **of_parts, **whitened},
        {**shared.parts, **head, "DIM_TILE": max(16, triton.next_power_of_2(head_dim))},
        (str(shared.kv_heads),),
        num_warps=8,
        num_stages=1,
    )
    leverages = {"leverages_ptr": call.result(0).pointer, **shared.pooled, **shared.moments}
    measure = DeviceLaunch(
        leverages_kernel,
        {**keys, **whitened, **shared.weighted, **leverages},
        {**read, **shared.table},
        parted,
        num_warps=8,
        num_stages=1,
    )
    return collect, whiten, measure


def _blend(call: Call, shared: _Shared) -> DeviceLaunch:
    given: dict[str, Argument] = {"positions_ptr": call.cache("positions"), **shared.compaction}
    results = {"scores_ptr": call.result(0).pointer, "new_positions_ptr": call.result(2).pointer}
    moments = triton.next_power_of_2(shared.kv_heads * _PARTS)
    return DeviceLaunch(
        blend_scores_kernel,
        {**given, **shared.pooled, **shared.moments, **results},
        {**shared.parts, **shared.cache, **shared.table, "MOMENTS": moments, "SCORES": _SCORES},
        (str(triton.cdiv(shared.longest, _SCORES)), str(shared.kv_heads)),
    )


score_leverage = KernelTemplate(torch.ops.llmc.score_leverage.default, supports, candidates)

leverages_budget = Budget("leverages_kernel")
