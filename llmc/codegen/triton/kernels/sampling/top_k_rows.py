"""llmc::top_k_rows: each row's k largest logits and where they are, in descending order, in two launches.

Reads L·V fp32 logits once, and writes and reads the k best of each chunk of a row. Logit and index are one 64-bit key
(the logit's bits made to order as an integer, then the index, lower ones larger), so that no two are equal and one
maximum finds both. A program takes the maximum of its keys k times over: k reductions of registers, some tenths of a
microsecond each, bound the time; that of the memory is less.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import fx

from llmc.codegen.call import RowsCall, arguments_of
from llmc.codegen.triton.kernel import DeviceLaunch, RowsTemplate, named_arguments
from llmc.codegen.triton.kernels.refusals import refuse_ranks, tensors_of
from llmc.graph.refusal import Refusal
from llmc.program.launch_arguments import Argument
from llmc.targets import GpuTarget

_CHUNK = 2048
_MAX_K = 128
# Candidates that one program can hold: chunks of a row times k.
_MAX_CANDIDATES = 16384

_LAST = tl.constexpr(0x7FFFFFFF)
# Below every key.
_NONE = tl.constexpr(-(2**63))


@triton.jit
def top_k_chunks_kernel(
    logits_ptr: tl.tensor,
    logits_row_stride: int,
    chunk_values_ptr: tl.tensor,
    chunk_indices_ptr: tl.tensor,
    chunk_sums_ptr: tl.tensor,
    VOCABULARY: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    K: tl.constexpr,
) -> None:
    """Program (c, l) leaves the K largest of chunk c of row l, and the sum of its weights if chunk_sums_ptr is given.

    Grid: (CHUNKS, L).
    """
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    logits = tl.load(logits_ptr + row * logits_row_stride + index, mask=index < VOCABULARY, other=float("-inf"))
    best = largest_keys(order_key(logits, index), K)
    lane = tl.arange(0, triton.next_power_of_2(K))
    place = (row * CHUNKS + chunk) * K + lane
    tl.store(chunk_values_ptr + place, value_of_key(best), mask=lane < K)
    tl.store(chunk_indices_ptr + place, index_of_key(best), mask=lane < K)
    if chunk_sums_ptr is not None:
        tl.store(chunk_sums_ptr + row * CHUNKS + chunk, tl.sum(tl.exp(logits - tl.max(logits, 0)), 0))


@triton.jit
def top_k_of_chunks_kernel(
    chunk_values_ptr: tl.tensor,
    chunk_indices_ptr: tl.tensor,
    values_ptr: tl.tensor,
    values_row_stride: int,
    indices_ptr: tl.tensor,
    indices_row_stride: int,
    K: tl.constexpr,
    CHUNKS: tl.constexpr,
) -> None:
    """Program l writes row l's K largest of its CHUNKS · K candidates. Grid: (L)."""
    row = tl.program_id(0).to(tl.int64)
    _, best = best_of_chunks(chunk_values_ptr, chunk_indices_ptr, row, K, CHUNKS)
    lane = tl.arange(0, triton.next_power_of_2(K))
    tl.store(values_ptr + row * values_row_stride + lane, value_of_key(best), mask=lane < K)
    tl.store(indices_ptr + row * indices_row_stride + lane, index_of_key(best), mask=lane < K)


@triton.jit
def best_of_chunks(
    chunk_values_ptr: tl.tensor,
    chunk_indices_ptr: tl.tensor,
    row: tl.tensor,
    K: tl.constexpr,
    CHUNKS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The logits of a row's candidates, and the keys of the K largest in descending order."""
    candidate = tl.arange(0, triton.next_power_of_2(CHUNKS * K))
    inside = candidate < CHUNKS * K
    first = row * (CHUNKS * K)
    logits = tl.load(chunk_values_ptr + first + candidate, mask=inside, other=float("-inf"))
    index = tl.load(chunk_indices_ptr + first + candidate, mask=inside, other=_LAST)
    return logits, largest_keys(order_key(logits, index), K)


@triton.jit
def order_key(logits: tl.tensor, index: tl.tensor) -> tl.tensor:
    """Larger for larger logits, then for lower indices. An integer orders as a float if negative ones are mirrored."""
    bits = tl.where(logits == 0.0, 0.0, logits).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ _LAST, bits)
    return (ordered.to(tl.int64) << 32) | (index ^ _LAST).to(tl.int64)


@triton.jit
def largest_keys(keys: tl.tensor, K: tl.constexpr) -> tl.tensor:
    """The K largest keys in descending order, in K lanes rounded up to a power of two."""
    LANES: tl.constexpr = triton.next_power_of_2(K)
    lane = tl.arange(0, LANES)
    found = tl.zeros([LANES], tl.int64)
    for i in range(K):
        best = tl.max(keys, axis=0)
        found = tl.where(lane == i, best, found)
        keys = tl.where(keys == best, _NONE, keys)
    return found


@triton.jit
def value_of_key(key: tl.tensor) -> tl.tensor:
    ordered = (key >> 32).to(tl.int32)
    return tl.where(ordered < 0, ordered ^ _LAST, ordered).to(tl.float32, bitcast=True)


@triton.jit
def index_of_key(key: tl.tensor) -> tl.tensor:
    return (key & _LAST).to(tl.int32) ^ _LAST


def supports(node: fx.Node, target: GpuTarget) -> Refusal | None:
    """logits: [rows, vocabulary], fp32; 1 ≤ k ≤ 128, and no more than the vocabulary."""
    logits, k = tensors_of(node)["logits"], arguments_of(node)["k"]
    found = refuse_ranks(node, logits=(2,))
    if found is not None:
        return found
    if logits.dtype is not torch.float32:
        return Refusal(f"logits are {logits.dtype}; the kernel orders float32", node)
    most = min(_MAX_K, logits.shape[1])
    if not 1 <= k <= most:
        return Refusal(f"k is {k}; the kernel finds 1 to {most} of {logits.shape[1]} logits", node)
    count = triton.cdiv(logits.shape[1], _CHUNK) * k
    if count > _MAX_CANDIDATES:
        reason = f"k = {k} of {logits.shape[1]} logits makes {count} candidates; a program holds {_MAX_CANDIDATES}"
        return Refusal(reason, node)
    return None


def candidates(call: RowsCall, target: GpuTarget) -> tuple[DeviceLaunch, ...]:
    """Return the single way: a launch over chunks, then one over their candidates."""
    return (chunked_launch(call, call.plain("k"), top_k_of_chunks_kernel, ("values", "indices")),)


def chunked_launch(call: RowsCall, k: int, join: Any, results: tuple[str, str], has_sums: bool = False) -> DeviceLaunch:
    """The launch that leaves the k largest logits of chunks, then that of `join`, which makes the results of them.

    has_sums: join also reads the sum of each chunk's weights.
    """
    (vocabulary,), count = call.shape("logits"), call.count("logits")
    chunk = int(min(_CHUNK, triton.next_power_of_2(vocabulary)))
    chunks = triton.cdiv(vocabulary, chunk)
    found: dict[str, Argument] = {}
    for name, dtype in (("chunk_values", torch.float32), ("chunk_indices", torch.int32)):
        found[f"{name}_ptr"] = call.workspace(name, count, chunks * k, dtype).pointer
    sums = {"chunk_sums_ptr": call.workspace("chunk_sums", count, chunks, torch.float32).pointer} if has_sums else {}
    sizes = {"K": k, "CHUNKS": chunks}
    arguments = named_arguments(join, call, results, **found, **sums)
    return DeviceLaunch(
        top_k_chunks_kernel,
        named_arguments(top_k_chunks_kernel, call, **found, **{"chunk_sums_ptr": None, **sums}),
        {"VOCABULARY": vocabulary, "CHUNK": chunk, **sizes},
        (str(chunks), str(count)),
        then=(DeviceLaunch(join, arguments, sizes, (str(count),), num_warps=8),),
    )


top_k_rows = RowsTemplate(torch.ops.llmc.top_k_rows.default, supports, candidates)
