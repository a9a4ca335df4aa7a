"""How much attention a request's last queries pay to each of its keys, in two launches over tiles of keys.

    mass[h, r] = Σ over pairs p of head h of exp(s[p, r] - m[p]) / Σ_j exp(s[p, j] - m[p]),   m[p] = max_j s[p, j]

The first launch leaves the maximum and the sum of each pair over a part of the keys. The second one joins the parts and
computes the logits again. Both read the keys once for each tile of pairs, and multiply 2·pairs·keys·D times. Which keys
a query sees: key_logits.py.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import fx

from llmc.codegen.call import Call, arguments_of
from llmc.codegen.triton.kernel import Constant, DeviceLaunch
from llmc.codegen.triton.kernels.agreed_sums import sum_of_products
from llmc.codegen.triton.kernels.attention.attend_keys import LOWEST
from llmc.codegen.triton.kernels.attention.kv_write import cache_codes, refuse_format
from llmc.codegen.triton.kernels.compaction.compaction_numbers import block_of
from llmc.codegen.triton.kernels.compaction.key_logits import first_seen, key_logits, pair_queries
from llmc.codegen.triton.kernels.refusals import refuse_dtypes, refuse_ranks
from llmc.codegen.triton.machine_code.budget import Budget
from llmc.graph.refusal import Refusal
from llmc.program.launch_arguments import Argument, Operand
from llmc.program.scored_compression import MOST_QUERIES
from llmc.targets import GpuTarget

_PARTS = 16
MAX_DIM = 256
# As NEVER of llmc/ops/peak_attention.py.
_NEVER = tl.constexpr(-1.0)


@triton.jit
def key_bounds_kernel(
    q_first_ptr: tl.tensor,
    q_second_ptr: tl.tensor,
    k_cache_ptr: tl.tensor,
    compaction_ptr: tl.tensor,
    maxima_ptr: tl.tensor,
    totals_ptr: tl.tensor,
    scale: float,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    CACHE_FORMAT: tl.constexpr,
    CACHE_GROUP: tl.constexpr,
    DIM_TILE: tl.constexpr,
    PAIRS: tl.constexpr,
    PAIR_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    PARTS: tl.constexpr,
    SINKS: tl.constexpr,
) -> None:
    """Program (s, i, h): the i-th tile of head h's pairs over part s of the keys. Grid: (PARTS, tiles, KV_HEADS).

    maxima, totals: [KV_HEADS, PARTS, PAIRS], both 0 where a pair sees no key of the part.
    """
    part, kv_head = tl.program_id(0), tl.program_id(2)
    pair = tl.program_id(1) * PAIR_TILE + tl.arange(0, PAIR_TILE)
    if tl.program_id(1) * PAIR_TILE >= tl.load(compaction_ptr + 2) * GROUP:
        return
    q, own_rows = pair_queries(
        q_first_ptr, q_second_ptr, compaction_ptr, pair, kv_head, HEADS, GROUP, HEAD_DIM, BLOCK_SIZE, DIM_TILE
    )
    rows = tl.load(compaction_ptr)
    first = first_seen(compaction_ptr, SINKS)
    share = tl.cdiv(tl.cdiv(tl.maximum(rows - first, 0), KEY_TILE), PARTS) * KEY_TILE
    start = first + part * share
    largest = tl.full([PAIR_TILE], LOWEST, tl.float32)
    total = tl.zeros([PAIR_TILE], tl.float32)
    for tile in tl.range(start, tl.minimum(start + share, rows), KEY_TILE):
        logits = key_logits(
            q, own_rows, tile + tl.arange(0, KEY_TILE), k_cache_ptr, compaction_ptr, kv_head, scale,
            KV_HEADS, HEAD_DIM, BLOCK_SIZE, SOFTCAP, CACHE_FORMAT, CACHE_GROUP, SINKS,
        )  # fmt: skip
        larger = tl.maximum(largest, tl.max(logits, 1))
        total = total * tl.exp2(largest - larger) + tl.sum(tl.exp2(logits - larger[:, None]), 1)
        largest = larger
    place = (kv_head * PARTS + part) * PAIRS + pair
    tl.store(maxima_ptr + place, tl.where(total > 0.0, largest, 0.0), mask=pair < PAIRS)
    tl.store(totals_ptr + place, total, mask=pair < PAIRS)


@triton.jit
def key_masses_kernel(
    q_first_ptr: tl.tensor,
    q_second_ptr: tl.tensor,
    k_cache_ptr: tl.tensor,
    compaction_ptr: tl.tensor,
    maxima_ptr: tl.tensor,
    totals_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    masses_ptr: tl.tensor,
    scale: float,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    CACHE_FORMAT: tl.constexpr,
    CACHE_GROUP: tl.constexpr,
    DIM_TILE: tl.constexpr,
    PAIRS: tl.constexpr,
    PAIR_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    PARTS: tl.constexpr,
    SINKS: tl.constexpr,
    LONGEST: tl.constexpr,
    PEAKS: tl.constexpr,
) -> None:
    """Program (i, h): the i-th tile of keys of head h, 0 for rows that are not there. Grid: (tiles, KV_HEADS).

    masses: [KV_HEADS, LONGEST]. With sums_ptr the mean over query heads is added to the sums of the rows before the
    queries'; the rows of the queries have none yet. With PEAKS it is instead the largest attention of a pair, or the
    number in sums: as of llmc::peak_attention.
    """
    kv_head = tl.program_id(1)
    row = tl.program_id(0) * KEY_TILE + tl.arange(0, KEY_TILE)
    rows, queries = tl.load(compaction_ptr), tl.load(compaction_ptr + 2)
    mass = tl.zeros([KEY_TILE], tl.float32)
    parts = tl.arange(0, PARTS)
    first = first_seen(compaction_ptr, SINKS)
    # None for a tile that no query sees.
    begin = tl.program_id(0) * KEY_TILE
    pairs = tl.where((begin < rows) & (begin + KEY_TILE > first), queries * GROUP, 0)
    for tile in tl.range(0, pairs, PAIR_TILE):
        pair = tile + tl.arange(0, PAIR_TILE)
        q, own_rows = pair_queries(
            q_first_ptr, q_second_ptr, compaction_ptr, pair, kv_head, HEADS, GROUP, HEAD_DIM, BLOCK_SIZE, DIM_TILE
        )
        logits = key_logits(
            q, own_rows, row, k_cache_ptr, compaction_ptr, kv_head, scale,
            KV_HEADS, HEAD_DIM, BLOCK_SIZE, SOFTCAP, CACHE_FORMAT, CACHE_GROUP, SINKS,
        )  # fmt: skip
        place = (kv_head * PARTS + parts)[None, :] * PAIRS + pair[:, None]
        present = (pair < pairs) & (own_rows >= first)
        maxima = tl.load(maxima_ptr + place, mask=present[:, None], other=0.0)
        totals = tl.load(totals_ptr + place, mask=present[:, None], other=1.0)
        maxima = tl.where(totals > 0.0, maxima, LOWEST)
        largest = tl.max(maxima, 1)
        total = sum_of_products(totals, tl.exp2(maxima - largest[:, None]), 1)
        share = tl.div_rn(1.0 + tl.zeros_like(total), total)
        if PEAKS:
            mass = tl.maximum(mass, tl.max(tl.exp2(logits - largest[:, None]) * share[:, None], 0))
        else:
            mass += sum_of_products(tl.exp2(logits - largest[:, None]), share[:, None], 0)
    if PEAKS:
        own = tl.load(compaction_ptr + 3)
        had = (row < own) & (queries > 0)
        block_and_head = block_of(compaction_ptr, row, had, BLOCK_SIZE) * KV_HEADS + kv_head
        before = tl.load(sums_ptr + block_and_head * BLOCK_SIZE + row % BLOCK_SIZE, mask=had, other=0.0)
        mass = tl.where((row < own) | (row >= rows), tl.maximum(mass, before), _NEVER)
    elif sums_ptr is not None:
        mass = tl.div_rn(mass, GROUP + tl.zeros_like(mass))
        had = row < rows - queries
        block_and_head = block_of(compaction_ptr, row, had, BLOCK_SIZE) * KV_HEADS + kv_head
        mass += tl.load(sums_ptr + block_and_head * BLOCK_SIZE + row % BLOCK_SIZE, mask=had, other=0.0)
    tl.store(masses_ptr + kv_head * LONGEST + row, mass, mask=row < LONGEST)


def refuse_scoring(node: fx.Node, target: GpuTarget) -> Refusal | None:
    """Queries of one float dtype, keys of a float dtype or in codes whose groups fit; up to 256 channels."""
    given = arguments_of(node)
    found = refuse_dtypes(node, "q_first", "q_second") or refuse_ranks(node, q_first=(4,), k_cache=(4,))
    if found is not None:
        return found
    q, k_cache = (given[name].meta["val"] for name in ("q_first", "k_cache"))
    channels = 2 * q.shape[3]
    if channels > MAX_DIM:
        return Refusal(f"heads have {channels} channels; the kernel takes {MAX_DIM} at most", node)
    if q.shape[1] % k_cache.shape[1]:
        return Refusal(f"{q.shape[1]} query heads do not divide among {k_cache.shape[1]} KV heads", node)
    if given["cache_format"] is None:
        return refuse_dtypes(node, "k_cache")
    return refuse_format(node, given["cache_format"], channels)


def mass_launches(
    call: Call,
    masses: Operand,
    *,
    sums: str | None = None,
    sinks: int | None = None,
    most_queries: int = MOST_QUERIES,
    peaks: bool = False,
) -> tuple[DeviceLaunch, DeviceLaunch]:
    """The two launches.

    masses: where they leave [KV_HEADS, longest]. sums: the op's argument that they are added to. sinks: queries see
    the rows of all queries except these first rows; None for queries that see what is behind them. peaks: they leave
    the largest attention, and not the sum.
    """
    (heads, block_size, half), kv_heads = call.shape("q_first")[-3:], call.shape("k_cache")[-3]
    group, longest = heads // kv_heads, int(call.plain("longest"))
    is_wide, dim_tile = call.dtype("q_first") is torch.float32, max(16, triton.next_power_of_2(2 * half))
    pairs, is_large = group * most_queries, is_wide or dim_tile > 128
    pair_tile, key_tile = (16, 16) if is_large else _tile(call.plain("cache_format") is not None, dim_tile > 2 * half)
    constants: dict[str, Constant] = {
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "HEAD_DIM": 2 * half,
        "BLOCK_SIZE": block_size,
        "SOFTCAP": float(call.plain("softcap") or 0.0),
        **cache_codes(call),
        "DIM_TILE": dim_tile,
        "PAIRS": pairs,
        "PAIR_TILE": pair_tile,
        "KEY_TILE": key_tile,
        "PARTS": _PARTS,
        "SINKS": -1 if sinks is None else sinks,
    }
    read: dict[str, Argument] = {f"{name}_ptr": call.cache(name) for name in ("q_first", "q_second", "k_cache")}
    read |= {"compaction_ptr": call.vector("compaction"), "scale": float(call.plain("scale"))}
    for name in ("maxima", "totals"):
        read[f"{name}_ptr"] = call.workspace(name, 1, kv_heads * _PARTS * pairs, torch.float32).pointer
    bounds = DeviceLaunch(
        key_bounds_kernel,
        read,
        constants,
        (str(_PARTS), str(triton.cdiv(pairs, pair_tile)), str(kv_heads)),
        num_warps=8 if is_large else 4,
        num_stages=1 if is_wide or sinks is not None else 2,
    )
    written: dict[str, Argument] = {"masses_ptr": masses, "sums_ptr": None if sums is None else call.cache(sums)}
    return bounds, replace(
        bounds,
        function=key_masses_kernel,
        arguments=read | written,
        constants={**constants, "LONGEST": longest, "PEAKS": peaks},
        grid=(str(triton.cdiv(longest, key_tile)), str(kv_heads)),
    )


def _tile(has_codes: bool, is_padded: bool) -> tuple[int, int]:
    """Pairs and keys of a tile. With larger tiles, codes spill registers."""
    if not has_codes:
        return 64, 64
    return (32, 16) if is_padded else (64, 32)


key_bounds_budget = Budget("key_bounds_kernel")
key_masses_budget = Budget("key_masses_kernel")
