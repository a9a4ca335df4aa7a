"""Whole steps of GPU programs over weights without their zeros, interpreted; and which GPUs get them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import fx

from llmc.codegen.expand_sparse import expand_sparse
from llmc.codegen.triton.lowering import lower_device
from llmc.codegen.triton.triton_kind import TritonKind
from llmc.ops.sparse_weight import mask_words
from llmc.program import Layout, Program, WeightSlot
from llmc.runtime.executors.stored_weights import in_rows
from tests.codegen.triton.test_quantized_programs import H100, OPTIONS, difference
from tests.gpu_target import gpu_target
from tests.passes.sparsity.sparse_graphs import sparse

_OPS = torch.ops.llmc


@pytest.mark.parametrize(
    ("quantize", "tolerance"),
    [("int8", 1e-4), *(pytest.param(*case, marks=pytest.mark.slow) for case in (("", 1e-4), ("w8a8:x32", 4e-2)))],
)
def test_steps_equal_the_graph(quantize: str, tolerance: float, tmp_path: Path) -> None:
    assert difference(sparse("magnitude:0.5,lm_head=magnitude:0.4", quantize).graph, tmp_path) < tolerance


@pytest.mark.parametrize("quantize", ["", "int8"])
def test_a_weight_takes_its_bits_and_a_number_a_row(quantize: str) -> None:
    graph = sparse("magnitude:0.5", quantize).graph
    stored, dense = (
        lower_device(graph, H100, OPTIONS),
        lower_device(expand_sparse(graph, lambda _: "a test"), H100, OPTIONS),
    )
    saved = sum(
        ((weight.dense_bits or 0.0) - (weight.bits or 0.0)) * weight.rows * weight.columns / 8 - 8 * weight.rows
        for weight in graph.sparse
    )
    assert _bytes(dense.program) - _bytes(stored.program) == saved
    # The graph reads the masks themselves.
    assert stored.graph_text is not None and '.mask_starts"' not in stored.graph_text
    layouts = [slot.layout for slot in stored.program.weights]
    assert layouts.count(Layout.MASK_ROWS) == layouts.count(Layout.MASK_STARTS) == 8


def _bytes(program: Program) -> int:
    return sum(slot.nbytes for slot in program.weights)


# One token's product with half of the elements: GPUs with little bandwidth for their arithmetic gain from it.
GAINS: Mapping[str, tuple[torch.dtype, ...]] = {
    "l4": (torch.bfloat16, torch.int8),
    "l40s": (torch.bfloat16, torch.int8),
    "rtx4090": (torch.bfloat16, torch.int8),
    "h100": (),
    "b200": (),
    "mi300x": (),
}


@pytest.mark.parametrize("name", GAINS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_which_gpus_read_masks(name: str, dtype: torch.dtype) -> None:
    reason = TritonKind(gpu_target(name)).dense_reason(_storage(dtype))
    assert (reason is None) is (dtype in GAINS[name])
    assert reason is None or (f"predicted for one token on {name}" in reason and "67108864 elements" in reason)


def test_a_target_of_several_gpus_reads_masks_where_all_gain() -> None:
    reason = TritonKind(gpu_target("l4,h100")).dense_reason(_storage(torch.bfloat16))
    assert reason is not None and "µs with zeros" in reason


def _storage(dtype: torch.dtype) -> fx.Node:
    graph, (out, columns) = fx.Graph(), (8192, 8192)
    shapes = {"values": ((out * columns // 2,), dtype), "masks": ((out, columns // 64), torch.int64)}
    if dtype is torch.int8:
        shapes["scales"] = ((out, 1), torch.float32)
    parts = []
    for name, (shape, of_part) in shapes.items():
        parts.append(graph.placeholder(name))
        parts[-1].meta["val"] = torch.empty(shape, dtype=of_part, device="meta")
    if dtype is torch.int8:
        return graph.call_function(_OPS.sparse_codes.default, (*parts, columns, "int8", torch.float32))
    return graph.call_function(_OPS.sparse_bitmask.default, (*parts, columns, torch.float32))


def test_masks_are_read_back_for_the_graph() -> None:
    kept = torch.rand(5, 100, generator=torch.Generator().manual_seed(0)) < 0.5
    masks = mask_words(kept)
    slot = WeightSlot("masks", "U8", tuple(masks.shape), Layout.MASK_ROWS, 8 * masks.numel())
    packed = TritonKind(H100).pack(masks, slot)
    assert torch.equal(in_rows(packed, slot, torch.int64), masks)
