"""llmc::paged_attention: causal attention of a ragged batch over the paged cache, prefill chunks and decodes mixed.

A step is three launches: requests with two tokens or more go to paged_prefill.py, or on sm_90 specialized_prefill.py,
those with a tree to a second launch of the former, and those with one token to paged_decode.py, which splits each over
its keys and joins the splits. Each launch
leaves the other kinds' requests alone, so that any mix is right. A step of T = R tokens is all decodes: the
first two grids are empty then.

Memory-bound in decode: moves C·KV·(D + Dv) elements of the cache, C positions in all requests, and 2·SPLITS·heads·Dv
fp32 partial sums per request at most. Matrix-bound in prefill: 2·A·heads·(D + Dv) operations for A query-key pairs.
"""

from collections.abc import Mapping
from types import MappingProxyType

import torch
import triton
from torch import fx

from llmc.codegen.call import Call, arguments_of
from llmc.codegen.newest_rows import refuse_newest_rows
from llmc.codegen.triton.kernel import Constant, DeviceLaunch, KernelTemplate, named_arguments
from llmc.codegen.triton.kernels.attention.attention_tiles import (
    Tile,
    decode_tile,
    heads_together,
    latent_tile,
    prefill_tiles,
    tree_tile,
)
from llmc.codegen.triton.kernels.attention.kv_write import caches, pair_codes, refuse_formats
from llmc.codegen.triton.kernels.attention.paged_decode import paged_decode_kernel
from llmc.codegen.triton.kernels.attention.paged_prefill import paged_prefill_kernel
from llmc.codegen.triton.kernels.attention.specialized_launch import ROW_TILE, specialized_launches
from llmc.codegen.triton.kernels.refusals import refuse_dtypes, refuse_ranks
from llmc.graph.refusal import Refusal
from llmc.program.arrival_counters import ARRIVALS, MOST_COUNTERS
from llmc.program.launch_arguments import Argument, Count
from llmc.targets import GpuTarget

_MAX_DIM = 256
# Limit for values that are also keys: fewer rows fit with them.
_MAX_LATENT_DIM = 512
# Query rows times columns that a program can hold in registers on every target.
_MAX_ROW_ELEMENTS = 128 * 128
# Two programs per multiprocessor hide each other's latencies; with more splits, joining them is expensive.
_PROGRAMS_PER_MULTIPROCESSOR = 2
_MAX_SPLITS = 64
# A decode's arguments for the keys that it writes itself: turning_decode.py sets them.
_OWN_KEY: Mapping[str, Argument] = MappingProxyType(
    {f"{name}_ptr": None for name in ("k", "v", "cos", "sin", "slot_mapping")} | {"k_row_stride": 0, "v_row_stride": 0}
)
# A grid's second and third dimension.
_MAX_GRID = 65535


def supports(node: fx.Node, target: GpuTarget) -> Refusal | None:
    """q and caches of float dtypes, the caches' no wider than q's; head and value dimension to 256, of latents 512."""
    given = arguments_of(node)
    is_coded = given["cache_format"] is not None
    found = refuse_dtypes(node, "q") or (None if is_coded else refuse_dtypes(node, "k_cache", "v_cache"))
    found = found or refuse_ranks(node, q=(3,), k_cache=(4,), v_cache=(4,), block_tables=(2,))
    found = found or refuse_newest_rows(node) or refuse_dtypes(node, "recent_k", "recent_v")
    if found is not None:
        return found
    q, k_cache, v_cache = (given[name].meta["val"] for name in ("q", "k_cache", "v_cache"))
    value_dim = given["value_dim"] if is_coded else v_cache.shape[3]
    head_dim = q.shape[2] - (value_dim if given["latent"] else 0)
    if is_coded:
        found = refuse_formats(node, given["cache_format"], head_dim, value_dim)
        if found is not None:
            return found
    numbers = k_cache if not is_coded or given["recent"] is None else given["recent_k"].meta["val"]
    if numbers.is_floating_point() and q.dtype is not numbers.dtype and numbers.dtype.itemsize >= q.dtype.itemsize:
        return Refusal(f"the cache is {numbers.dtype} but q is {q.dtype}: the kernel multiplies in q's dtype", node)
    for name, dim in (("head_dim", head_dim), ("value_dim", value_dim)):
        limit = _MAX_LATENT_DIM if given["latent"] and name == "value_dim" else _MAX_DIM
        if dim > limit:
            return Refusal(f"{name} is {dim}; the kernel holds rows of up to {limit}", node)
    heads, kv_heads = q.shape[1], k_cache.shape[1]
    if heads % kv_heads:
        return Refusal(f"{heads} query heads do not divide among {kv_heads} KV heads", node)
    most = _MAX_ROW_ELEMENTS // triton.next_power_of_2(max(16, head_dim, value_dim))
    if heads_together(heads // kv_heads, given["latent"]) > most:
        reason = f"{heads // kv_heads} query heads share a KV head; with these dimensions a program holds {most}"
        return Refusal(reason, node)
    if given["bias"] is not None or (given["sinks"] is not None and given["sinks"].meta["val"].dim() == 2):
        return Refusal("each token has its own bias or sinks, which GPU kernels do not support yet", node)
    if given["chosen"] is not None:
        return Refusal("each token sees chosen keys only, which GPU kernels do not support yet", node)
    if given["scale"] <= 0:
        return Refusal(f"scale is {given['scale']}: the running maximum needs a positive one", node)
    return None


def candidates(call: Call, target: GpuTarget) -> tuple[DeviceLaunch, ...]:
    """Prefill with each of the target's tiles, the predicted best first; decode is the same in all of them."""
    heads, query_dim = call.shape("q")
    kv_heads, is_latent = call.shape("k_cache")[-3], bool(call.plain("latent"))
    is_coded = call.plain("cache_format") is not None
    value_dim = call.plain("value_dim") if is_coded else call.shape("v_cache")[-1]
    head_dim = query_dim - (value_dim if is_latent else 0)
    group = heads_together(heads // kv_heads, is_latent)
    dim_tile, value_tile = (max(16, triton.next_power_of_2(dim)) for dim in (head_dim, value_dim))
    constants: dict[str, Constant] = {
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "SHARES": heads // kv_heads // group,
        "LATENT": is_latent,
        "HEAD_DIM": head_dim,
        "VALUE_DIM": value_dim,
        "BLOCK_SIZE": call.block_size(),
        "WINDOW": call.plain("window") or 0,
        "CHUNK": call.plain("chunk") or 0,
        "PINNED": call.plain("pinned") or 0,
        "RECENT": call.plain("recent") or 0,
        "SOFTCAP": float(call.plain("softcap") or 0.0),
        "DIM_TILE": dim_tile,
        "VALUE_TILE": value_tile,
        **pair_codes(call),
    }
    common = {**caches(call), **_newest_caches(call), "max_blocks": Count.MAX_BLOCKS}
    common["scale"] = float(call.plain("scale"))
    is_fp32, widest = call.dtype("q") is torch.float32, max(dim_tile, value_tile)
    own = latent_tile(target, is_fp32) if is_latent else None
    is_apart = call.plain("recent") is not None
    shortest = own or decode_tile(target, is_fp32, widest, group, is_coded=is_coded, is_apart=is_apart)
    decode = _decode(call, target, common, constants, shortest)
    arguments = named_arguments(paged_prefill_kernel, call, **common, requests=Count.REQUESTS)
    tokens = call.count("q")

    def grid(row_tile: int) -> tuple[str, str]:
        # Each request rounds its tiles up, so cdiv(T, tile) + R are enough. If T = R, every request has one token.
        return str(heads // group), f"min(cdiv({tokens}, {row_tile // group}) + R, ({tokens} - R) * {_MAX_GRID})"

    def prefill(tile: Tile, trees: bool, then: tuple[DeviceLaunch, ...]) -> DeviceLaunch:
        row_tile = max(tile.rows, triton.next_power_of_2(group))
        return DeviceLaunch(
            paged_prefill_kernel,
            arguments,
            {**constants, "ROW_TILE": row_tile, "KEY_TILE": tile.keys, "TREES": trees},
            grid(row_tile),
            tile.num_warps,
            tile.num_stages,
            then=then,
        )

    of_trees = own or tree_tile(is_fp32, widest, group, is_apart=is_apart)
    trees = () if arguments["tree_masks_ptr"] is None else (prefill(of_trees, True, ()),)
    needs = {"is_padded": (head_dim, value_dim) != (dim_tile, value_tile), "is_coded": is_coded, "is_apart": is_apart}
    tiles = (own,) if own else prefill_tiles(target, is_fp32, widest, **needs)
    specialized = specialized_launches(call, target, arguments, constants, grid(ROW_TILE), (*trees, decode))
    return (*specialized, *(prefill(tile, False, (*trees, decode)) for tile in tiles))


def _newest_caches(call: Call) -> dict[str, Argument]:
    """The arguments for the caches of newest rows; absent where there are none."""
    is_apart = call.plain("recent") is not None
    return {f"{name}_ptr": call.cache(name) if is_apart else None for name in ("recent_k", "recent_v")}


def _decode(
    call: Call, target: GpuTarget, common: dict[str, Argument], constants: dict[str, Constant], tile: Tile
) -> DeviceLaunch:
    heads, value_tile, group = call.shape("q")[0], constants["VALUE_TILE"], constants["GROUP"]
    assert isinstance(value_tile, int) and isinstance(group, int)
    min_split = 2 * tile.keys
    splits = decode_splits(target, heads // group, call.limits().max_model_len, min_split)
    if call.limits().max_sequences * (heads // group) > MOST_COUNTERS:
        splits = 1  # So many requests fill the GPU.
    columns = call.limits().max_sequences * heads * splits * (value_tile + 4)
    partials = call.workspace("partials", 1, columns, torch.float32).pointer
    return DeviceLaunch(
        paged_decode_kernel,
        named_arguments(paged_decode_kernel, call, **common, **_OWN_KEY, partials_ptr=partials, arrivals_ptr=ARRIVALS),
        {
            **constants,
            "KEY_TILE": tile.keys,
            "SPLITS": splits,
            "MIN_SPLIT": min_split,
            "ROW_TILE": tile.rows,
            "HALF": 0,
            "INTERLEAVED": False,
        },
        (str(splits), str(heads // group), "R"),
        tile.num_warps,
        tile.num_stages,
    )


def decode_splits(target: GpuTarget, shares: int, max_model_len: int, min_split: int) -> int:
    """Return the number of programs that divide one request's keys, for each share of its heads: a power of two, enough
    for one request to fill the GPU.

    It depends on neither the step nor its requests: a request's sums are always taken in the same order.
    """
    wanted = max(1, _PROGRAMS_PER_MULTIPROCESSOR * target.sm_count // shares)
    useful = triton.next_power_of_2(triton.cdiv(max_model_len, min_split))
    floor: int = triton.next_power_of_2(wanted + 1) // 2
    return int(min(floor, useful, _MAX_SPLITS))


paged_attention = KernelTemplate(torch.ops.llmc.paged_attention.default, supports, candidates)
