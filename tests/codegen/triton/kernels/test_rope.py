"""The rotation and cache-writing kernels: both kinds of pairs, partial rotation, every cache dtype, in place; and the
rotation of whole heads before codes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from llmc.codegen.triton.kernels.attention.kv_write import kv_write
from llmc.codegen.triton.kernels.attention.rope_kv_write import rope_kv_write
from llmc.codegen.triton.kernels.rows.rope import rope
from llmc.codegen.triton.kernels.rows.rope_angles import rope_angles
from llmc.codegen.triton.kernels.rows.rotate_heads import rotate_heads
from tests.codegen.triton.tensor_call import check
from tests.seeded_normal import seeded_normal
from tests.tolerances import GPU_KERNELS

DTYPES = list(GPU_KERNELS)


def _angles(tokens: int, half: int) -> tuple[Tensor, Tensor]:
    angles = seeded_normal(9, tokens, half) * 3
    return angles.cos(), angles.sin()


def _slots(tokens: int, slots: int) -> Tensor:
    return torch.randperm(slots, generator=torch.Generator().manual_seed(5))[:tokens].int()


@pytest.mark.parametrize("half", [1, 16, 48, 64])
def test_angles(device: str, half: int) -> None:
    positions = torch.tensor([0, 1, 17, 4095, 131071], dtype=torch.int32)
    inv_freq = 10000 ** -(torch.arange(half) / half)
    check(rope_angles, positions, inv_freq, 1.25, device=device, tolerance=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("heads", "head_dim", "half"), [(1, 2, 1), (3, 64, 32), (5, 40, 10), (33, 80, 16)])
def test_rope(device: str, heads: int, head_dim: int, half: int, interleaved: bool, dtype: torch.dtype) -> None:
    x = seeded_normal(0, 3, heads, head_dim).to(dtype)
    for in_place in (False, True):
        check(rope, x, *_angles(3, half), interleaved, device=device, tolerance=GPU_KERNELS[dtype], in_place=in_place)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "head_dim", "first"), [(1, 1, 1), (5, 24, 24), (3, 64, 64), (2, 96, 32)])
def test_rotate_heads(device: str, heads: int, head_dim: int, first: int, dtype: torch.dtype) -> None:
    x = seeded_normal(0, 3, heads, head_dim).to(dtype)
    for in_place in (False, True):
        check(rotate_heads, x, first, device=device, tolerance=GPU_KERNELS[dtype], in_place=in_place)


@pytest.mark.parametrize("cache_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_kv_write(device: str, dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    k, v = seeded_normal(0, 5, 3, 24).to(dtype), seeded_normal(1, 5, 3, 16).to(dtype)
    k_cache, v_cache = seeded_normal(2, 3, 3, 4, 24).to(cache_dtype), seeded_normal(3, 3, 3, 4, 16).to(cache_dtype)
    tolerance = 0.0 if dtype is cache_dtype else GPU_KERNELS[cache_dtype]
    check(kv_write, k, v, k_cache, v_cache, _slots(5, 12), device=device, tolerance=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "half"), [(1, 1, 8, 4), (9, 3, 80, 16), (32, 8, 128, 64)])
def test_rope_kv_write(
    device: str, heads: int, kv_heads: int, head_dim: int, half: int, interleaved: bool, dtype: torch.dtype
) -> None:
    q, k, v = (seeded_normal(i, 3, h, head_dim).to(dtype) for i, h in enumerate((heads, kv_heads, kv_heads)))
    caches = [seeded_normal(i, 2, kv_heads, 4, head_dim).to(dtype) for i in (3, 4)]
    arguments = (q, k, v, *_angles(3, half), *caches, _slots(3, 8), interleaved)
    for in_place in (False, True):
        check(rope_kv_write, *arguments, device=device, tolerance=GPU_KERNELS[dtype], in_place=in_place)


def test_rope_kv_write_into_another_dtype(device: str) -> None:
    q, k, v = seeded_normal(0, 2, 4, 16), seeded_normal(1, 2, 2, 16), seeded_normal(2, 2, 2, 24)
    caches = (seeded_normal(3, 2, 2, 4, 16).half(), seeded_normal(4, 2, 2, 4, 24).half())
    check(rope_kv_write, q, k, v, *_angles(2, 8), *caches, _slots(2, 8), False, device=device, tolerance=1e-3)
