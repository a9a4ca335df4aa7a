"""llmc::row_masses: y[l] = Σ_v exp((logits[l, v] - values[l, 0]) / temperature[l]), in two launches.

Memory-bound: reads L·V fp32 logits once. Chunks are summed apart and then in order: a row's sum is always the same.
"""

import torch
import triton
import triton.language as tl
from torch import fx

from llmc.codegen.call import RowsCall
from llmc.codegen.triton.kernel import DeviceLaunch, RowsTemplate, named_arguments
from llmc.codegen.triton.kernels.refusals import refuse_ranks, tensors_of
from llmc.graph.refusal import Refusal
from llmc.targets import GpuTarget

_CHUNK = 4096


@triton.jit
def mass_chunks_kernel(
    logits_ptr: tl.tensor,
    logits_row_stride: int,
    values_ptr: tl.tensor,
    values_row_stride: int,
    temperature_ptr: tl.tensor,
    parts_ptr: tl.tensor,
    VOCABULARY: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
) -> None:
    """Program (c, l) leaves the sum of chunk c of row l. Grid: (CHUNKS, L)."""
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    logits = tl.load(logits_ptr + row * logits_row_stride + index, mask=index < VOCABULARY, other=float("-inf"))
    temperature = tl.load(temperature_ptr + row)
    divisor = tl.where(temperature > 0.0, temperature, 1.0)
    weights = tl.exp((logits - tl.load(values_ptr + row * values_row_stride)) / divisor)
    tl.store(parts_ptr + row * CHUNKS + chunk, tl.sum(weights, 0))


@triton.jit
def add_masses_kernel(parts_ptr: tl.tensor, y_ptr: tl.tensor, y_row_stride: int, CHUNKS: tl.constexpr) -> None:
    """Program l adds up row l's chunks. Grid: (L)."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, triton.next_power_of_2(CHUNKS))
    tl.store(
        y_ptr + row * y_row_stride, tl.sum(tl.load(parts_ptr + row * CHUNKS + chunk, mask=chunk < CHUNKS, other=0.0), 0)
    )


def supports(node: fx.Node, target: GpuTarget) -> Refusal | None:
    """logits: [rows, vocabulary], values: [rows, candidates], temperature: [rows], all fp32."""
    for name, tensor in tensors_of(node).items():
        if tensor.dtype is not torch.float32:
            return Refusal(f"{name} is {tensor.dtype}; the kernel adds float32", node)
    return refuse_ranks(node, logits=(2,), values=(2,), temperature=(1,))


def candidates(call: RowsCall, target: GpuTarget) -> tuple[DeviceLaunch, ...]:
    (vocabulary,), count = call.shape("logits"), call.count("logits")
    chunk = min(_CHUNK, triton.next_power_of_2(vocabulary))
    chunks = triton.cdiv(vocabulary, chunk)
    parts = call.workspace("parts", count, chunks, torch.float32).pointer
    join = DeviceLaunch(
        add_masses_kernel,
        named_arguments(add_masses_kernel, call, parts_ptr=parts),
        {"CHUNKS": chunks},
        (str(count),),
        num_warps=1,
    )
    return (
        DeviceLaunch(
            mass_chunks_kernel,
            named_arguments(mass_chunks_kernel, call, parts_ptr=parts),
            {"VOCABULARY": vocabulary, "CHUNK": chunk, "CHUNKS": chunks},
            (str(chunks), str(count)),
            num_warps=8,
            then=(join,),
        ),
    )


row_masses = RowsTemplate(torch.ops.llmc.row_masses.default, supports, candidates)
