"""llmc::top_tokens: each row's likeliest tokens and the logarithms of their probabilities, in two launches.

    logprob = logit - largest - log Σ_chunks e^(chunk's largest - largest) · Σ_v e^(logit[v] - chunk's largest)

As top_k_rows, with each chunk's sum beside its largest ones: reads the logits once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import fx

from llmc.codegen.call import Call
from llmc.codegen.triton.kernel import DeviceLaunch, KernelTemplate, rows
from llmc.codegen.triton.kernels.refusals import refuse_ranks, tensors_of
from llmc.codegen.triton.kernels.sampling.top_k_rows import index_of_key, largest_keys, order_key, value_of_key
from llmc.graph.refusal import Refusal
from llmc.program.launch_arguments import Argument
from llmc.targets import GpuTarget

_CHUNK = 2048

_LAST = tl.constexpr(0x7FFFFFFF)


@triton.jit
def top_chunks_kernel(
    logits_ptr: tl.tensor,
    logits_row_stride: int,
    chunk_values_ptr: tl.tensor,
    chunk_indices_ptr: tl.tensor,
    chunk_sums_ptr: tl.tensor,
    VOCABULARY: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    K: tl.constexpr,
    K_TILE: tl.constexpr,
) -> None:
    """Program (c, l) leaves the K largest of chunk c of row l, and the sum of its weights. Grid: (CHUNKS, rows)."""
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    logits = tl.load(logits_ptr + row * logits_row_stride + index, mask=index < VOCABULARY, other=float("-inf"))
    best = largest_keys(order_key(logits, index), K, K_TILE)
    lane = tl.arange(0, K_TILE)
    place = (row * CHUNKS + chunk) * K + lane
    tl.store(chunk_values_ptr + place, value_of_key(best), mask=lane < K)
    tl.store(chunk_indices_ptr + place, index_of_key(best), mask=lane < K)
    tl.store(chunk_sums_ptr + row * CHUNKS + chunk, tl.sum(tl.exp(logits - tl.max(logits, 0)), 0))


@triton.jit
def top_tokens_kernel(
    chunk_values_ptr: tl.tensor,
    chunk_indices_ptr: tl.tensor,
    chunk_sums_ptr: tl.tensor,
    token_map_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    ids_row_stride: int,
    logprobs_ptr: tl.tensor,
    logprobs_row_stride: int,
    K: tl.constexpr,
    K_TILE: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK_TILE: tl.constexpr,
    CANDIDATE_TILE: tl.constexpr,
) -> None:
    """Program l writes row l's K likeliest tokens of its CHUNKS · K candidates. Grid: (rows)."""
    row = tl.program_id(0).to(tl.int64)
    candidate = tl.arange(0, CANDIDATE_TILE)
    inside = candidate < CHUNKS * K
    first = row * (CHUNKS * K)
    logits = tl.load(chunk_values_ptr + first + candidate, mask=inside, other=float("-inf"))
    index = tl.load(chunk_indices_ptr + first + candidate, mask=inside, other=_LAST)
    best = largest_keys(order_key(logits, index), K, K_TILE)
    largest = tl.max(logits, 0)
    chunk = tl.arange(0, CHUNK_TILE)
    # The first candidate of a chunk is its largest logit.
    heads = tl.load(chunk_values_ptr + first + chunk * K, mask=chunk < CHUNKS, other=float("-inf"))
    sums = tl.load(chunk_sums_ptr + row * CHUNKS + chunk, mask=chunk < CHUNKS, other=0.0)
    log_sum = largest + tl.log(tl.sum(sums * tl.exp(heads - largest), 0))
    lane = tl.arange(0, K_TILE)
    ids = index_of_key(best)
    if token_map_ptr is not None:
        ids = tl.load(token_map_ptr + ids, mask=lane < K, other=0)
    tl.store(ids_ptr + row * ids_row_stride + lane, ids, mask=lane < K)
    tl.store(logprobs_ptr + row * logprobs_row_stride + lane, value_of_key(best) - log_sum, mask=lane < K)


def supports(node: fx.Node, target: GpuTarget) -> Refusal | None:
    """logits: [rows, vocabulary] or [rows, several, vocabulary], fp32."""
    logits = tensors_of(node)["logits"]
    if logits.dtype is not torch.float32:
        return Refusal(f"logits are {logits.dtype}; the kernel orders float32", node)
    return refuse_ranks(node, logits=(2, 3))


def candidates(call: Call, target: GpuTarget) -> tuple[DeviceLaunch, ...]:
    """One way: a launch over chunks, then one over their candidates."""
    (vocabulary,), k, count = call.shape("logits"), call.plain("count"), call.count("logits")
    chunk, k_tile = int(min(_CHUNK, triton.next_power_of_2(vocabulary))), triton.next_power_of_2(k)
    chunks = triton.cdiv(vocabulary, chunk)
    found: dict[str, Argument] = {}
    for name, dtype, each in (
        ("chunk_values", torch.float32, k),
        ("chunk_indices", torch.int32, k),
        ("chunk_sums", torch.float32, 1),
    ):
        found[f"{name}_ptr"] = call.workspace(name, count, chunks * each, dtype).pointer
    join = DeviceLaunch(
        top_tokens_kernel,
        {
            **found,
            "token_map_ptr": call.vector("token_map"),
            **rows("ids", call.result(0)),
            **rows("logprobs", call.result(1)),
        },
        {
            "K": k,
            "K_TILE": k_tile,
            "CHUNKS": chunks,
            "CHUNK_TILE": triton.next_power_of_2(chunks),
            "CANDIDATE_TILE": triton.next_power_of_2(chunks * k),
        },
        (str(count),),
        num_warps=8,
    )
    return (
        DeviceLaunch(
            top_chunks_kernel,
            {**rows("logits", call.rows("logits")), **found},
            {"VOCABULARY": vocabulary, "CHUNK": chunk, "CHUNKS": chunks, "K": k, "K_TILE": k_tile},
            (str(chunks), str(count)),
            num_warps=4,
            then=(join,),
        ),
    )


top_tokens = KernelTemplate(torch.ops.llmc.top_tokens.default, supports, candidates)
