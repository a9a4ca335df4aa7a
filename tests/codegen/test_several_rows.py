"""Products on CPUs whose x has [tokens, several, channels]: so many rows more, for every product and storage."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import fx

from llmc.codegen.cpp.lowering import lower
from llmc.graph.execute import Chunk, run_steps
from llmc.options import BuildOptions
from llmc.targets import host_target
from tests.codegen.engine_harness import run_engine
from tests.codegen.tiny_models import VOCABULARY, GraphBuilder, aten, ops

STEPS = ((Chunk(0, 0, tuple(range(7))), Chunk(1, 0, (5, 69, 0))), (Chunk(0, 7, (7,)),))
F32 = torch.float32


def stored(b: GraphBuilder, name: str, format: str | None, rows: int, columns: int) -> fx.Node:
    if format is None:
        return b.weight(name, rows, columns, scale=0.3)
    codes = b.constant(f"{name}_codes", torch.randint(-7, 8, (rows, columns), dtype=torch.int8))
    scales = b.constant(f"{name}_scales", torch.rand(rows, columns // 32) / 8)
    return b.call(ops.dequantize.default, codes, scales, None, format, F32)


@pytest.mark.parametrize("formats", [(None, None), ("int4", None), ("int8", "int8")], ids=str)
def test_every_product_takes_them(formats: tuple[str | None, str | None], tmp_path: Path) -> None:
    format, x_format = formats
    torch.manual_seed(3)
    b = GraphBuilder(F32)

    def arrived(x: fx.Node) -> fx.Node:
        return x if x_format is None else b.call(ops.round_tokens.default, x, None, x_format, F32)

    x = b.call(ops.embedding.default, b.inputs["input_ids"], b.weight("table", VOCABULARY, 96, scale=1.0))
    x = b.call(aten.reshape.default, x, [-1, 3, 32])
    y = b.call(ops.linear.default, arrived(x), stored(b, "first", format, 64, 32), None, F32)
    weight, bias = stored(b, "second", format, 64, 32), b.weight("bias", 64)
    y = b.call(ops.fused_linear.default, arrived(x), weight, bias, y, "gelu_tanh", 0.5, F32)
    y = b.call(ops.gated_linear.default, arrived(y), stored(b, "gates", format, 64, 64), None, "silu", F32)
    rows = b.call(ops.select_rows.default, b.call(aten.reshape.default, y, [-1, 96]), b.inputs["logit_rows"])
    graph, source = b.finish(b.call(ops.lm_head.default, rows, b.weight("head", VOCABULARY, 96)))
    got = run_engine(lower(graph, host_target(), BuildOptions()), source, STEPS, host_target(), tmp_path)
    want = run_steps(graph, source, STEPS)
    for step, expected in zip(got, want, strict=True):
        for a, e in zip(step, expected, strict=True):
            assert e.abs().max() > 0.1
            torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-5)
