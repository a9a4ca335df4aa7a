"""llmc::argmax_rows: y[l] = argmax_v logits[l, v], the lowest of equals, in two launches.

Memory-bound: reads L·V fp32 logits once. A row is cut into chunks, so that the logits of a single row are read by many
programs; the second launch reads one pair a chunk.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import fx

from llmc.codegen.call import Call
from llmc.codegen.triton.kernel import DeviceLaunch, KernelTemplate, rows
from llmc.codegen.triton.kernels.refusals import refuse_ranks, tensors_of
from llmc.graph.refusal import Refusal
from llmc.program import RowCount
from llmc.targets import GpuTarget

_CHUNK = 4096


@triton.jit
def argmax_chunks_kernel(
    logits_ptr: tl.tensor,
    logits_row_stride: int,
    maxima_ptr: tl.tensor,
    places_ptr: tl.tensor,
    VOCABULARY: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
) -> None:
    """Program (c, l) leaves the maximum of chunk c of row l, and where it is. Grid: (CHUNKS, L)."""
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = index < VOCABULARY
    logits = tl.load(logits_ptr + row * logits_row_stride + index, mask=inside, other=float("-inf"))
    largest, place = tl.max(logits, axis=0, return_indices=True)
    tl.store(maxima_ptr + row * CHUNKS + chunk, largest)
    tl.store(places_ptr + row * CHUNKS + chunk, chunk * CHUNK + place)


@triton.jit
def argmax_of_chunks_kernel(
    maxima_ptr: tl.tensor,
    places_ptr: tl.tensor,
    y_ptr: tl.tensor,
    y_row_stride: int,
    CHUNKS: tl.constexpr,
    CHUNK_TILE: tl.constexpr,
) -> None:
    """Program l writes the index of row l's largest logit. Grid: (L)."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNK_TILE)
    maxima = tl.load(maxima_ptr + row * CHUNKS + chunk, mask=chunk < CHUNKS, other=float("-inf"))
    tl.store(y_ptr + row * y_row_stride, tl.load(places_ptr + row * CHUNKS + tl.argmax(maxima, axis=0)))


def supports(node: fx.Node, target: GpuTarget) -> Refusal | None:
    """logits: [rows, vocabulary], fp32."""
    logits = tensors_of(node)["logits"]
    if logits.dtype is not torch.float32:
        return Refusal(f"logits are {logits.dtype}; the kernel compares float32", node)
    return refuse_ranks(node, logits=(2,))


def candidates(call: Call, target: GpuTarget) -> tuple[DeviceLaunch, ...]:
    """One way: a launch over chunks, then one over their maxima."""
    (vocabulary,) = call.shape("logits")
    chunks, count = triton.cdiv(vocabulary, _CHUNK), str(call.count("logits"))
    found = {}
    for name, dtype in (("maxima", torch.float32), ("places", torch.int32)):
        workspace = rows(name, call.workspace(name, RowCount(count), chunks, dtype))
        found[f"{name}_ptr"] = workspace[f"{name}_ptr"]
    join = DeviceLaunch(
        argmax_of_chunks_kernel,
        {**found, **rows("y", call.result())},
        {"CHUNKS": chunks, "CHUNK_TILE": triton.next_power_of_2(chunks)},
        (count,),
        num_warps=1,
    )
    return (
        DeviceLaunch(
            argmax_chunks_kernel,
            {**rows("logits", call.rows("logits")), **found},
            {"VOCABULARY": vocabulary, "CHUNK": _CHUNK, "CHUNKS": chunks},
            (str(chunks), count),
            num_warps=8,
            then=(join,),
        ),
    )


argmax_rows = KernelTemplate(torch.ops.llmc.argmax_rows.default, supports, candidates)
