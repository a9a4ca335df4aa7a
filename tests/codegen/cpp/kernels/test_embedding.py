"""Embedding lookups from row-major tables and from the panels of a tied lm_head, for every instruction set."""

from __future__ import annotations

import pytest
import torch

from llmc.codegen.cpp.pack import pack
from llmc.ops.embedding import embedding
from llmc.program import Layout
from llmc.targets import CpuTarget
from tests.codegen.cpp.linear_calls import call_embedding
from tests.codegen.cpp.runnable_targets import RUNNABLE


@pytest.mark.parametrize("target", RUNNABLE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize(("tokens", "entries", "channels"), [(1, 1, 1), (1, 33, 8), (131, 97, 61), (67, 64, 130)])
def test_embedding_is_exact(target: CpuTarget, dtype: torch.dtype, tokens: int, entries: int, channels: int) -> None:
    torch.manual_seed(0)
    table = torch.randn(entries, channels).to(dtype)
    ids = torch.randint(entries, (tokens,), dtype=torch.int32)
    ids[-1] = entries - 1
    for kernel, layout in (("embedding", Layout.ROWS), ("embedding_panels", Layout.PANELS)):
        y = torch.empty(tokens, channels + 3, dtype=dtype)[:, :channels]
        assert torch.equal(call_embedding(target, kernel, ids, pack(table, layout, dtype), y), embedding(ids, table))


@pytest.mark.parametrize("target", RUNNABLE)
def test_a_table_of_ids(target: CpuTarget) -> None:
    table = torch.randint(2**30, (97, 3), dtype=torch.int64)
    ids = torch.tensor([96, 0, 41], dtype=torch.int32)
    y = torch.empty(3, 3, dtype=torch.int32)
    packed = pack(table, Layout.ROWS, torch.int32)
    assert torch.equal(call_embedding(target, "embedding", ids, packed, y).long(), embedding(ids, table))
