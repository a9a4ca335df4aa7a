"""llmc::sample_candidates: draw a token from each row's candidates: temperature, top-k, top-p, min-p, noise.

    w[i] = exp((z[i] - z[0]) / temperature), by which the filters keep or drop
    y = indices[i] with the largest z[i] / temperature + Gumbel noise among the candidates that they keep

Reads K candidates and eight numbers per row, one program each: its cost is the latency of a launch.
"""

import torch
import triton
import triton.language as tl
from torch import fx

from llmc.codegen.call import RowsCall
from llmc.codegen.triton.kernel import DeviceLaunch, RowsTemplate, named_arguments
from llmc.codegen.triton.kernels.refusals import refuse_ranks, tensors_of
from llmc.codegen.triton.kernels.sampling.draw_rows import token_noise
from llmc.graph.refusal import Refusal
from llmc.ops.sampling import EVERY_TOKEN
from llmc.targets import GpuTarget

_MAX_CANDIDATES = 1024
_OF_A_ROW = ("masses", "drawn", "temperature", "top_k", "top_p", "min_p", "seeds", "counters")
_INTEGERS = ("indices", "drawn", "top_k", "seeds", "counters")
_EVERY_TOKEN = tl.constexpr(EVERY_TOKEN)
_NO_TOKEN = tl.constexpr(2**31 - 1)


@triton.jit
def sample_candidates_kernel(
    values_ptr: tl.tensor,
    values_row_stride: int,
    indices_ptr: tl.tensor,
    indices_row_stride: int,
    masses_ptr: tl.tensor,
    drawn_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
    seeds_ptr: tl.tensor,
    counters_ptr: tl.tensor,
    y_ptr: tl.tensor,
    y_row_stride: int,
    covered_ptr: tl.tensor,
    covered_row_stride: int,
    CANDIDATES: tl.constexpr,
    COMPLETE: tl.constexpr,
) -> None:
    """Program l draws row l's token. Grid: (L). Candidates are in descending order: what filters keep is a prefix."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, triton.next_power_of_2(CANDIDATES))
    temperature, top_k = tl.load(temperature_ptr + row), tl.load(top_k_ptr + row)
    top_p, min_p = tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
    is_random = temperature > 0.0
    values_ptr += row * values_row_stride
    largest = tl.load(values_ptr)
    values = tl.load(values_ptr + lane, mask=lane < tl.minimum(top_k, CANDIDATES), other=float("-inf"))
    weights = tl.exp((values - largest) / tl.where(is_random, temperature, 1.0))
    cuts = top_k < CANDIDATES
    total = tl.where(cuts | COMPLETE, tl.sum(weights, 0), tl.load(masses_ptr + row))
    before = tl.cumsum(weights, 0) - weights
    keep = (before < top_p * total) & (weights >= min_p) & (weights > 0.0)
    kept = tl.sum(keep.to(tl.int32), 0)
    tokens = tl.load(indices_ptr + row * indices_row_stride + lane, mask=lane < CANDIDATES, other=_NO_TOKEN)
    noise = token_noise(tl.load(seeds_ptr + row), tl.load(counters_ptr + row), tokens)
    sums = tl.where(keep, values / tl.where(is_random, temperature, 1.0) + noise, float("-inf"))
    token = tl.min(tl.where(keep & (sums == tl.max(sums, 0)), tokens, _NO_TOKEN), 0)
    edge = tl.load(values_ptr + tl.minimum(tl.maximum(top_k, 1), CANDIDATES) - 1)
    beyond = tl.load(values_ptr + tl.minimum(top_k, CANDIDATES - 1))
    covered = tl.where(cuts, edge > beyond, COMPLETE | (kept < CANDIDATES))
    is_plain = (temperature <= 0.0) | ((top_k == _EVERY_TOKEN) & (top_p >= 1.0) & (min_p <= 0.0))
    tl.store(y_ptr + row * y_row_stride, tl.where(is_plain, tl.load(drawn_ptr + row), token))
    tl.store(covered_ptr + row * covered_row_stride, (is_plain | covered).to(tl.int32))


def supports(node: fx.Node, target: GpuTarget) -> Refusal | None:
    """values: [rows, candidates], fp32, at most 1024 candidates; indices of the same shape; the rest: [rows]."""
    tensors = tensors_of(node)
    for name, tensor in tensors.items():
        wanted = torch.int32 if name in _INTEGERS else torch.float32
        if tensor.dtype is not wanted:
            return Refusal(f"{name} is {tensor.dtype}; the kernel takes {wanted}", node)
    if tensors["values"].shape[1] > _MAX_CANDIDATES:
        return Refusal(f"{tensors['values'].shape[1]} candidates; a program holds {_MAX_CANDIDATES}", node)
    return refuse_ranks(node, values=(2,), indices=(2,), **dict.fromkeys(_OF_A_ROW, (1,)))


def candidates(call: RowsCall, target: GpuTarget) -> tuple[DeviceLaunch, ...]:
    (count,) = call.shape("values")
    arguments = named_arguments(sample_candidates_kernel, call, ("y", "covered"))
    constants = {"CANDIDATES": count, "COMPLETE": call.plain("complete")}
    return (DeviceLaunch(sample_candidates_kernel, arguments, constants, (str(call.count("values")),), num_warps=1),)


sample_candidates = RowsTemplate(torch.ops.llmc.sample_candidates.default, supports, candidates)
