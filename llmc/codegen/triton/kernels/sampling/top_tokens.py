"""llmc::top_tokens: each row's likeliest tokens and the logarithms of their probabilities, in two launches.

    logprob = logit - largest - log Σ_chunks e^(chunk's largest - largest) · Σ_v e^(logit[v] - chunk's largest)

As top_k_rows, with each chunk's sum stored next to its largest logits: reads the logits once.
"""

import torch
import triton
import triton.language as tl
from torch import fx

from llmc.codegen.call import Call
from llmc.codegen.triton.kernel import DeviceLaunch, KernelTemplate
from llmc.codegen.triton.kernels.agreed_sums import sum_of_products
from llmc.codegen.triton.kernels.refusals import refuse_ranks, tensors_of
from llmc.codegen.triton.kernels.sampling.top_k_rows import best_of_chunks, chunked_launch, index_of_key, value_of_key
from llmc.graph.refusal import Refusal
from llmc.targets import GpuTarget


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
    CHUNKS: tl.constexpr,
) -> None:
    """Program l writes row l's K likeliest tokens of its CHUNKS · K candidates. Grid: (rows)."""
    row = tl.program_id(0).to(tl.int64)
    logits, best = best_of_chunks(chunk_values_ptr, chunk_indices_ptr, row, K, CHUNKS)
    largest = tl.max(logits, 0)
    chunk = tl.arange(0, triton.next_power_of_2(CHUNKS))
    # The first candidate of a chunk is its largest logit.
    heads = tl.load(chunk_values_ptr + row * (CHUNKS * K) + chunk * K, mask=chunk < CHUNKS, other=float("-inf"))
    sums = tl.load(chunk_sums_ptr + row * CHUNKS + chunk, mask=chunk < CHUNKS, other=0.0)
    log_sum = largest + tl.log(sum_of_products(sums, tl.exp(heads - largest), 0))
    lane = tl.arange(0, triton.next_power_of_2(K))
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
    """Return the single way: a launch over chunks, then one over their candidates."""
    return (chunked_launch(call, call.plain("count"), top_tokens_kernel, ("ids", "logprobs"), has_sums=True),)


top_tokens = KernelTemplate(torch.ops.llmc.top_tokens.default, supports, candidates)
