"""llmc::paged_attention: causal attention of a ragged batch over the paged cache, prefill chunks and decodes mixed.

A step is four launches: requests with two tokens or more go to paged_prefill.py, those with a tree to a second launch
of it, those with one token to paged_decode.py, which splits each over its keys, and combine_splits joins the splits.
Each launch leaves the other kinds' requests alone, so that any mix is right. A step of T = R tokens is all decodes: the
first two grids are empty then.

Memory-bound in decode: moves C·KV·(D + Dv) elements of the cache, C positions in all requests, and 2·SPLITS·heads·Dv
fp32 partial sums a request at most. Matrix-bound in prefill: 2·A·heads·(D + Dv) operations for A query-key pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import fx

from llmc.codegen.call import Call, arguments_of
from llmc.codegen.triton.kernel import Constant, DeviceLaunch, KernelTemplate, rows
from llmc.codegen.triton.kernels.attention.kv_write import cache_codes, refuse_format
from llmc.codegen.triton.kernels.attention.paged_decode import combine_splits_kernel, paged_decode_kernel
from llmc.codegen.triton.kernels.attention.paged_prefill import paged_prefill_kernel
from llmc.codegen.triton.kernels.refusals import refuse_dtypes, refuse_ranks
from llmc.graph.refusal import Refusal
from llmc.program.launch_arguments import Argument, Count
from llmc.targets import GpuTarget

_MAX_DIM = 256
# Query rows times columns that a program can hold in registers on every target.
_MAX_ROW_ELEMENTS = 128 * 128
# Two programs a multiprocessor hide each other's latencies; more splits than this make joining them dear.
_PROGRAMS_PER_MULTIPROCESSOR = 2
_MAX_SPLITS = 64
# A grid's second and third dimension.
_MAX_GRID = 65535


@dataclass(frozen=True)
class Tile:
    """rows: query rows of a program. keys: cached positions a turn."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def supports(node: fx.Node, target: GpuTarget) -> Refusal | None:
    """q and caches of float dtypes, the caches' no wider than q's; head and value dimension up to 256."""
    given = arguments_of(node)
    is_coded = given["cache_format"] is not None
    found = refuse_dtypes(node, "q") or (None if is_coded else refuse_dtypes(node, "k_cache", "v_cache"))
    found = found or refuse_ranks(node, q=(3,), k_cache=(4,), v_cache=(4,), block_tables=(2,))
    if found is not None:
        return found
    q, k_cache, v_cache = (given[name].meta["val"] for name in ("q", "k_cache", "v_cache"))
    head_dim, value_dim = (q.shape[2], given["value_dim"]) if is_coded else (k_cache.shape[3], v_cache.shape[3])
    if is_coded:
        found = refuse_format(node, given["cache_format"], head_dim, value_dim)
        if found is not None:
            return found
    elif q.dtype is not k_cache.dtype and k_cache.dtype.itemsize >= q.dtype.itemsize:
        return Refusal(f"the cache is {k_cache.dtype} but q is {q.dtype}: the kernel multiplies in q's dtype", node)
    for name, dim in (("head_dim", head_dim), ("value_dim", value_dim)):
        if dim > _MAX_DIM:
            return Refusal(f"{name} is {dim}; the kernel holds rows of up to {_MAX_DIM}", node)
    heads, kv_heads = q.shape[1], k_cache.shape[1]
    if heads % kv_heads:
        return Refusal(f"{heads} query heads do not divide among {kv_heads} KV heads", node)
    most = _MAX_ROW_ELEMENTS // triton.next_power_of_2(max(16, head_dim, value_dim))
    if heads // kv_heads > most:
        reason = f"{heads // kv_heads} query heads share a KV head; with these dimensions a program holds {most}"
        return Refusal(reason, node)
    if given["scale"] <= 0:
        return Refusal(f"scale is {given['scale']}: the running maximum needs a positive one", node)
    return None


def candidates(call: Call, target: GpuTarget) -> tuple[DeviceLaunch, ...]:
    """Prefill with each of the target's tiles, the predicted best first; decode is the same in all of them."""
    heads, head_dim = call.shape("q")
    kv_heads = call.shape("k_cache")[-3]
    is_coded = call.plain("cache_format") is not None
    value_dim = call.plain("value_dim") if is_coded else call.shape("v_cache")[-1]
    group = heads // kv_heads
    dim_tile, value_tile = (max(16, triton.next_power_of_2(dim)) for dim in (head_dim, value_dim))
    constants: dict[str, Constant] = {
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "VALUE_DIM": value_dim,
        "BLOCK_SIZE": call.block_size(),
        "WINDOW": call.plain("window") or 0,
        "CHUNK": call.plain("chunk") or 0,
        "SOFTCAP": float(call.plain("softcap") or 0.0),
        "DIM_TILE": dim_tile,
        "VALUE_TILE": value_tile,
        **cache_codes(call),
    }
    arguments: dict[str, Argument] = {
        **rows("q", call.rows("q")),
        "k_cache_ptr": call.cache("k_cache"),
        "v_cache_ptr": call.cache("v_cache"),
        "query_starts_ptr": call.vector("query_starts"),
        "context_lens_ptr": call.vector("context_lens"),
        "block_tables_ptr": call.vector("block_tables"),
        "slopes_ptr": call.vector("slopes"),
        "max_blocks": Count.MAX_BLOCKS,
        "scale": float(call.plain("scale")),
    }
    is_fp32, widest = call.dtype("q") is torch.float32, max(dim_tile, value_tile)
    decode = _decode(call, target, arguments, constants, decode_tile(target, is_fp32, widest, group, is_coded))
    masks, tokens = call.vector("tree_masks"), call.count("q")
    arguments |= {"tree_masks_ptr": masks, "sinks_ptr": call.vector("sinks"), **rows("y", call.result())}

    def prefill(tile: Tile, trees: bool, then: tuple[DeviceLaunch, ...]) -> DeviceLaunch:
        row_tile = max(tile.rows, triton.next_power_of_2(group))
        # Any request's tiles find a place in cdiv(T, tile) + R; with T = R there is no request with two tokens.
        tiles = f"min(cdiv({tokens}, {row_tile // group}) + R, ({tokens} - R) * {_MAX_GRID})"
        return DeviceLaunch(
            paged_prefill_kernel,
            {**arguments, "requests": Count.REQUESTS},
            {**constants, "ROW_TILE": row_tile, "KEY_TILE": tile.keys, "TREES": trees},
            (str(kv_heads), tiles),
            tile.num_warps,
            tile.num_stages,
            then=then,
        )

    trees = () if masks is None else (prefill(tree_tile(is_fp32, widest, group), True, ()),)
    is_padded = (head_dim, value_dim) != (dim_tile, value_tile)
    tiles = prefill_tiles(target, is_fp32, widest, is_padded=is_padded, is_coded=is_coded)
    return tuple(prefill(tile, False, (*trees, *decode)) for tile in tiles)


def _decode(
    call: Call, target: GpuTarget, arguments: dict[str, Argument], constants: dict[str, Constant], tile: Tile
) -> tuple[DeviceLaunch, ...]:
    heads, kv_heads, value_tile = call.shape("q")[0], call.shape("k_cache")[-3], constants["VALUE_TILE"]
    assert isinstance(value_tile, int)
    min_split = 2 * tile.keys
    splits = decode_splits(target, kv_heads, call.limits().max_model_len, min_split)
    columns = call.limits().max_sequences * heads * splits * (value_tile + 4)
    partials = call.workspace("partials", 1, columns, torch.float32).pointer
    split: dict[str, Constant] = {"KEY_TILE": tile.keys, "SPLITS": splits, "MIN_SPLIT": min_split}
    attend = DeviceLaunch(
        paged_decode_kernel,
        {**arguments, "partials_ptr": partials},
        {**constants, **split, "ROW_TILE": tile.rows},
        (str(splits), str(kv_heads), "R"),
        tile.num_warps,
        tile.num_stages,
    )
    combine = DeviceLaunch(
        combine_splits_kernel,
        {
            "partials_ptr": partials,
            "query_starts_ptr": arguments["query_starts_ptr"],
            "context_lens_ptr": arguments["context_lens_ptr"],
            "sinks_ptr": call.vector("sinks"),
            **rows("y", call.result()),
        },
        {"HEADS": heads, **{n: constants[n] for n in ("VALUE_DIM", "WINDOW", "CHUNK", "VALUE_TILE")}, **split},
        (str(heads), "R"),
        num_warps=4,
        num_stages=1,
    )
    return attend, combine


def decode_splits(target: GpuTarget, kv_heads: int, max_model_len: int, min_split: int) -> int:
    """How many programs share one KV head of one request: a power of two, enough for one request to fill the GPU.

    It depends on neither the step nor its requests: a request's sums are always taken in the same order.
    """
    wanted = max(1, _PROGRAMS_PER_MULTIPROCESSOR * target.sm_count // kv_heads)
    useful = triton.next_power_of_2(triton.cdiv(max_model_len, min_split))
    floor: int = triton.next_power_of_2(wanted + 1) // 2
    return int(min(floor, useful, _MAX_SPLITS))


def decode_tile(target: GpuTarget, is_fp32: bool, dim: int, group: int, is_coded: bool) -> Tile:
    """The tile of a decode program: all query heads of a KV head, and at least what a matrix instruction takes."""
    row_tile = max(16, triton.next_power_of_2(group))
    if is_fp32:
        return Tile(row_tile, 32, 8, 2)
    # For sm_100, 64 keys of 128 channels as codes with groups take a few registers more than there are.
    is_short = dim > 128 or row_tile > 32 or (is_coded and dim > 64 and target.arch == 100)
    return Tile(row_tile, 32 if is_short else 64, 4 if row_tile <= 32 else 8, 3)


def tree_tile(is_fp32: bool, dim: int, group: int) -> Tile:
    """The tile of a program for queries of a tree, whose masks take registers."""
    if is_fp32:
        return Tile(16, 16, 4 if dim <= 128 else 8, 1)
    return Tile(32 if dim <= 64 else 16, 32, 4 if triton.next_power_of_2(group) <= 32 else 8, 1)


def prefill_tiles(target: GpuTarget, is_fp32: bool, dim: int, *, is_padded: bool, is_coded: bool) -> tuple[Tile, ...]:
    """Tiles that hold dim columns without spilling on the target, the best first. dim: a power of two up to 256.

    is_padded: some of the columns are masked out, which takes registers. is_coded: keys and values become numbers in
    registers instead of going from the cache to shared memory, which takes more.
    """
    if is_fp32:
        return (Tile(16, 32, 4, 1),) if dim <= 128 else (Tile(16, 16, 8, 1),)
    if target.backend == "hip":
        return (Tile(128, 32, 4, 2),) if dim <= 128 else (Tile(64, 16, 4, 1),)
    if target.has_tma:
        if dim <= 64:
            return (Tile(128, 64, 8, 3),) if is_coded else (Tile(128, 64, 8, 3), Tile(128, 64, 4, 3))
        if dim <= 128:
            is_full = is_padded or is_coded
            return (Tile(128, 64, 8, 3),) if is_full else (Tile(128, 64, 8, 3), Tile(128, 128, 8, 3))
        is_full = is_coded or target.arch == 100
        return (Tile(64, 32, 8, 2),) if is_full else (Tile(128, 32, 8, 2), Tile(64, 64, 8, 2))
    if dim <= 64:
        return (Tile(128, 64, 8, 3),)
    if dim > 128 and is_coded:
        return (Tile(32, 32, 8, 2),)
    if dim > 128 or is_padded:
        return (Tile(64, 32, 8, 2),)
    return (Tile(128, 32, 8, 3),) if is_coded else (Tile(128, 32, 8, 3), Tile(64, 32, 4, 3))


paged_attention = KernelTemplate(torch.ops.llmc.paged_attention.default, supports, candidates)
