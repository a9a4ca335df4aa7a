"""Run where llmc has the storage `bitmask`: an engine with it in every product computes what its graph computes."""

from __future__ import annotations

import operator
import tempfile
from pathlib import Path

import torch
from torch import fx

from llmc.codegen.cpp.lowering import lower
from llmc.codegen.triton.norm_claims import norm_before
from llmc.graph.execute import Chunk, run_steps
from llmc.graph.product_parts import parts_before
from llmc.options import BuildOptions
from llmc.passes.fusion.merge_qkv import merge_qkv
from llmc.passes.runner import run_pipeline
from llmc.targets import host_target
from tests.codegen.engine_harness import run_engine
from tests.codegen.tiny_models import VOCABULARY, GraphBuilder, aten, ops

CHANNELS = 256
STEPS = ((Chunk(0, 0, tuple(range(23))), Chunk(1, 0, (5, 69, 0))), (Chunk(0, 23, (7,)),))


def stored(b: GraphBuilder, name: str, rows: int) -> fx.Node:
    """A weight of which a quarter is not zero."""
    kept = torch.rand(rows, CHANNELS, generator=torch.Generator().manual_seed(rows)) < 0.25
    bits = kept.view(rows, -1, 32).long() << torch.arange(32)
    words = bits.sum(-1)
    mask = torch.where(words >= 2**31, words - 2**32, words).int()
    values = torch.randn(rows, CHANNELS // 2, generator=torch.Generator().manual_seed(rows + 1)) / CHANNELS**0.5
    parts = b.constant(f"{name}_mask", mask), b.constant(f"{name}_values", (2 * values).bfloat16())
    return b.call(ops.bitmask.default, *parts, torch.float32)


def check(dtype: torch.dtype, directory: Path) -> None:
    """embedding and lm_head tied; two linears that merge_qkv makes one; a gate; a residual sum with bias and scale; and
    experts."""
    b = GraphBuilder(dtype)
    table = stored(b, "table", VOCABULARY)
    x = b.call(ops.embedding.default, b.inputs["input_ids"], table, dtype)
    first, second = (b.call(ops.linear.default, x, stored(b, name, CHANNELS + 32)) for name in ("first", "second"))
    h = b.call(aten.slice.Tensor, b.call(aten.add.Tensor, first, second), 1, 0, CHANNELS)
    h = b.call(ops.gated_linear.default, h, stored(b, "gates", 2 * CHANNELS), None, "silu")
    bias = b.weight("bias", CHANNELS)
    h = b.call(ops.fused_linear.default, h, stored(b, "down", CHANNELS), bias, x, "gelu_tanh", 0.5)
    chosen = b.call(ops.top_k.default, b.call(aten.slice.Tensor, h, 1, 0, 3), 2)
    shares, index = (b.call(operator.getitem, chosen, i) for i in range(2))
    sent = b.call(ops.expert_linear.default, h, stored(b, "experts", 3 * CHANNELS), None, index, 3)
    h = b.call(ops.sum_experts.default, sent, shares)
    rows = b.call(ops.select_rows.default, h, b.inputs["logit_rows"])
    graph, source = b.finish(b.call(ops.lm_head.default, rows, table))
    merged = run_pipeline(graph, (merge_qkv,), BuildOptions()).graph
    products = [n for n in merged.graph.nodes if parts_before(n)]
    assert len(products) == 6, "merge_qkv stacks weights whatever they are stored as"
    assert all(norm_before(product) is None for product in products)
    lowered = lower(merged, host_target(), BuildOptions())
    assert [x.family for x in lowered.program.launches if x.family.startswith("row_")] == [
        "row_embedding",
        "row_linear",
        "row_gated_linear",
        "row_linear",
        "row_expert_linear",
        "row_lm_head",
    ]
    got, want = run_engine(lowered, source, STEPS, host_target(), directory), run_steps(merged, source, STEPS)
    for step, expected in zip(got, want, strict=True):
        for a, e in zip(step, expected, strict=True):
            torch.testing.assert_close(a, e, rtol=0, atol=1e-5 if dtype is torch.float32 else 0.03)


if __name__ == "__main__":
    for each, name in ((torch.float32, "F32"), (torch.bfloat16, "BF16")):
        with tempfile.TemporaryDirectory() as folder:
            check(each, Path(folder))
        print(name)
