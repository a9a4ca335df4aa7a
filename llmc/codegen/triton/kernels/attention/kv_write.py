"""llmc::kv_write: k_cache[slot // S, h, slot % S] = k[t, h], likewise v, where S is the block size and slot is t's.

Memory-bound: moves 2·T·KV·(D + Dv) elements. A program copies a few heads of one token, first keys then values.
"""

import torch
import triton
import triton.language as tl
from torch import fx

from llmc.codegen.call import Call, arguments_of
from llmc.codegen.triton.kernel import Constant, DeviceLaunch, KernelTemplate, named_arguments
from llmc.codegen.triton.kernels.attention.kv_write_codes import code_launch, code_write_kernel
from llmc.codegen.triton.kernels.refusals import refuse_dtypes, refuse_ranks, tensors_of
from llmc.codegen.triton.machine_code.budget import Budget
from llmc.formats.cache_format import parse_cache_format, parts_of_pair
from llmc.graph.refusal import Refusal
from llmc.program.launch_arguments import Argument
from llmc.targets import GpuTarget

_ELEMENTS_PER_PROGRAM = 1024


@triton.jit
def kv_write_kernel(
    k_ptr: tl.tensor,
    k_row_stride: int,
    v_ptr: tl.tensor,
    v_row_stride: int,
    k_cache_ptr: tl.tensor,
    v_cache_ptr: tl.tensor,
    slot_mapping_ptr: tl.tensor,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
) -> None:
    """Program (t, j) writes the j-th HEAD_BLOCK heads of token t into both caches, cast to the cache's dtype."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    position = slot_rows(slot, head, KV_HEADS, BLOCK_SIZE)
    DIM_BLOCK: tl.constexpr = triton.next_power_of_2(max(HEAD_DIM, VALUE_DIM))
    copy_heads(k_ptr + token * k_row_stride, k_cache_ptr, head, position, KV_HEADS, HEAD_DIM, DIM_BLOCK)
    copy_heads(v_ptr + token * v_row_stride, v_cache_ptr, head, position, KV_HEADS, VALUE_DIM, DIM_BLOCK)


@triton.jit
def slot_rows(slot: tl.tensor, head: tl.tensor, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr) -> tl.tensor:
    """Which row of a cache seen as [blocks·KV_HEADS·BLOCK_SIZE, dim] is the slot's, for each head."""
    return (slot // BLOCK_SIZE * KV_HEADS + head) * BLOCK_SIZE + slot % BLOCK_SIZE


@triton.jit
def copy_heads(
    source_ptr: tl.tensor,
    cache_ptr: tl.tensor,
    head: tl.tensor,
    position: tl.tensor,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
) -> None:
    """Copy heads of one token to their rows of a cache."""
    channel = tl.arange(0, DIM_BLOCK)
    inside = (head < KV_HEADS)[:, None] & (channel < DIM)[None, :]
    values = tl.load(source_ptr + head[:, None] * DIM + channel[None, :], mask=inside)
    destination = cache_ptr + position[:, None] * DIM + channel[None, :]
    tl.store(destination, values.to(cache_ptr.dtype.element_ty), mask=inside)


def supports(node: fx.Node, target: GpuTarget) -> Refusal | None:
    """k, v: [tokens, kv_heads, dim] of one float dtype; both caches of one float dtype, or of codes."""
    format = arguments_of(node)["cache_format"]
    found = refuse_dtypes(node, "k", "v") or refuse_ranks(node, k=(3,), v=(3,))
    if found is None and format is not None:
        tensors = tensors_of(node)
        return refuse_formats(node, format, tensors["k"].shape[2], tensors["v"].shape[2])
    found = found or refuse_dtypes(node, "k_cache", "v_cache")
    return found or refuse_ranks(node, k=(3,), v=(3,), k_cache=(4,), v_cache=(4,))


def candidates(call: Call, target: GpuTarget) -> tuple[DeviceLaunch, ...]:
    slot = cache_constants(call)
    if call.plain("cache_format") is not None:
        arguments = named_arguments(code_write_kernel, call, **caches(call), cos_ptr=None, sin_ptr=None)
        return (code_launch(call, arguments, slot, {**pair_codes(call), "HALF": 0, "INTERLEAVED": False}),)
    heads, dim = slot["KV_HEADS"], max(slot["HEAD_DIM"], slot["VALUE_DIM"])
    block = min(triton.next_power_of_2(heads), max(1, _ELEMENTS_PER_PROGRAM // triton.next_power_of_2(dim)))
    grid = (str(call.count("k")), str(triton.cdiv(heads, block)))
    arguments = named_arguments(kv_write_kernel, call, **caches(call))
    return (DeviceLaunch(kv_write_kernel, arguments, {**slot, "HEAD_BLOCK": block}, grid),)


def caches(call: Call) -> dict[str, Argument]:
    """The arguments for the caches of keys and values."""
    return {f"{name}_ptr": call.cache(name) for name in ("k_cache", "v_cache")}


def cache_constants(call: Call) -> dict[str, int]:
    """The shape of a slot."""
    kv_heads, head_dim = call.shape("k")
    _, value_dim = call.shape("v")
    return {"KV_HEADS": kv_heads, "HEAD_DIM": head_dim, "VALUE_DIM": value_dim, "BLOCK_SIZE": call.block_size()}


def cache_codes(call: Call) -> dict[str, Constant]:
    """Constants for the format of keys: CACHE_FORMAT is none for numbers; CACHE_GROUP is 0 for one scale per head."""
    keys, _ = parts_of_pair(call.plain("cache_format"))
    return _codes("CACHE", keys)


def pair_codes(call: Call) -> dict[str, Constant]:
    """The same, and for values VALUE_FORMAT and VALUE_GROUP."""
    _, values = parts_of_pair(call.plain("cache_format"))
    return cache_codes(call) | _codes("VALUE", values)


def _codes(name: str, text: str | None) -> dict[str, Constant]:
    format = None if text is None else parse_cache_format(text)
    codes, group = ("none", 0) if format is None else (format.codes, format.group or 0)
    return {f"{name}_FORMAT": codes, f"{name}_GROUP": group}


def refuse_formats(node: fx.Node, text: str, keys: int, values: int) -> Refusal | None:
    """The same as refuse_format for a pair of caches. keys, values: channels of a head."""
    of_keys, of_values = parts_of_pair(text)
    assert of_keys is not None and of_values is not None
    return refuse_format(node, of_keys, keys) or refuse_format(node, of_values, values)


def refuse_format(node: fx.Node, text: str, *dims: int) -> Refusal | None:
    """Groups of channels must be a power of two that divides half of a head; heads are cut in two."""
    group = parse_cache_format(text).group
    for dim in dims:
        if dim % 2:
            return Refusal(f"a head of {dim} channels has no halves; kernels code two halves", node)
        if group is not None and (group & (group - 1) or dim // 2 % group):
            return Refusal(f"groups of {group} channels do not fit half of a head of {dim} in kernels", node)
    return None


kv_write = KernelTemplate(torch.ops.llmc.kv_write.default, supports, candidates)

kv_write_budget = Budget("kv_write_kernel")
