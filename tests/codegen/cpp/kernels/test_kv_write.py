"""llmc_kv_write, with and without the rotation of q and k, against llmc::kv_write and llmc::rope_kv_write."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from llmc.ops.kv_write import kv_write
from llmc.ops.rope import rope_kv_write
from llmc.targets import CpuTarget
from tests.codegen.cpp.kernel_calls import call, pointer, rows
from tests.codegen.cpp.runnable_targets import RUNNABLE
from tests.tolerances import ELEMENTS

DTYPES = [torch.float32, torch.bfloat16]
# tokens, heads, kv_heads, head_dim, value_dim, half, block_size
SHAPES = [(1, 1, 1, 2, 1, 1, 8), (3, 6, 2, 20, 12, 5, 16), (50, 8, 8, 64, 64, 32, 16), (29, 9, 3, 96, 80, 48, 24)]


@pytest.mark.parametrize("target", RUNNABLE)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache_dtype", DTYPES)
@pytest.mark.parametrize("rotation", ["none", "halves", "interleaved"])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_reference(
    target: CpuTarget,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    rotation: str,
    shape: tuple[int, int, int, int, int, int, int],
) -> None:
    tokens, heads, kv_heads, head_dim, value_dim, half, block_size = shape
    generator = torch.Generator().manual_seed(tokens)
    widths = [heads * head_dim, kv_heads * head_dim, kv_heads * value_dim]
    q, k, v = torch.randn(tokens, sum(widths), generator=generator).to(dtype).split(widths, dim=1)
    blocks = tokens // block_size + 2
    slots = torch.randperm(blocks * block_size, generator=generator)[:tokens].int()
    angles = 100 * torch.rand(tokens, half, generator=generator)
    cos, sin = angles.cos(), angles.sin()
    expected, actual = (_caches(blocks, kv_heads, block_size, head_dim, value_dim, cache_dtype) for _ in range(2))
    heads_of = (q.unflatten(1, (heads, -1)), k.unflatten(1, (kv_heads, -1)), v.unflatten(1, (kv_heads, -1)))
    q_out = torch.empty(tokens, heads, head_dim, dtype=dtype)
    if rotation == "none":
        kv_write(*heads_of[1:], *expected, slots)
    else:
        expected_q = rope_kv_write(*heads_of, cos, sin, *expected, slots, rotation == "interleaved")
    values = {
        "tokens": tokens,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "value_dim": value_dim,
        "half": half,
        "block_size": block_size,
        "interleaved": int(rotation == "interleaved"),
        "q": rows(q),
        "k": rows(k),
        "v": rows(v),
        "cos": None if rotation == "none" else pointer(cos),
        "sin": None if rotation == "none" else pointer(sin),
        "k_cache": pointer(actual[0]),
        "v_cache": pointer(actual[1]),
        "slot_mapping": pointer(slots),
        "q_out": rows(q_out),
    }
    call(target, "kv_write", [dtype, cache_dtype], values)
    tolerance = max(ELEMENTS[dtype], ELEMENTS[cache_dtype])
    torch.testing.assert_close(actual[0], expected[0], rtol=tolerance, atol=tolerance)
    assert torch.equal(actual[1], expected[1])
    if rotation != "none":
        torch.testing.assert_close(q_out, expected_q, rtol=ELEMENTS[dtype], atol=ELEMENTS[dtype])


def _caches(
    blocks: int, kv_heads: int, block_size: int, head_dim: int, value_dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Filled with a mark, so that a write outside of its slots shows."""
    shape = (blocks, kv_heads, block_size)
    return torch.full((*shape, head_dim), 7.0).to(dtype), torch.full((*shape, value_dim), 7.0).to(dtype)
