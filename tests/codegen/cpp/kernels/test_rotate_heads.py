"""llmc_rotate_heads against the op's reference."""

from __future__ import annotations

import pytest
import torch

from llmc.ops.rotate_heads import rotate_heads
from llmc.targets import CpuTarget
from tests.codegen.cpp.kernel_calls import call, rows
from tests.codegen.cpp.runnable_targets import RUNNABLE
from tests.tolerances import ELEMENTS


@pytest.mark.parametrize("target", RUNNABLE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(
    ("tokens", "heads", "head_dim", "first"),
    [(1, 1, 1, 1), (5, 3, 6, 6), (3, 2, 8, 8), (130, 4, 64, 64), (7, 2, 80, 80), (2, 3, 96, 96), (4, 1, 576, 64)],
)
def test_equals_the_reference(
    target: CpuTarget, dtype: torch.dtype, in_place: bool, tokens: int, heads: int, head_dim: int, first: int
) -> None:
    generator = torch.Generator().manual_seed(head_dim)
    merged = torch.randn(tokens, heads * head_dim + 5, generator=generator).to(dtype)
    x = merged[:, 3:-2].unflatten(1, (heads, head_dim))
    expected = rotate_heads(x, first)
    y = x if in_place else torch.empty(tokens, heads, head_dim, dtype=dtype)
    sizes = {"tokens": tokens, "heads": heads, "head_dim": head_dim, "first": first}
    call(target, "rotate_heads", [dtype], {**sizes, "x": rows(x), "y": rows(y)})
    torch.testing.assert_close(y, expected, rtol=ELEMENTS[dtype], atol=ELEMENTS[dtype])
