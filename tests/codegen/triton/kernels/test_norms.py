"""The norm kernels against their references: with and without residual, weights and groups, short rows and long."""

from __future__ import annotations

import pytest
import torch

from llmc.codegen.triton.kernels.rows import row_block
from llmc.codegen.triton.kernels.rows.layer_norm import add_layer_norm, layer_norm
from llmc.codegen.triton.kernels.rows.rms_norm import add_rms_norm, rms_norm
from tests.codegen.triton.tensor_call import check
from tests.seeded_normal import seeded_normal
from tests.tolerances import GPU_KERNELS

SHAPES = [(1, 1), (3, 17), (2, 128), (5, 1000), (2, 3, 64), (7, 5, 33)]
DTYPES = list(GPU_KERNELS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm(device: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = seeded_normal(0, *shape, mean=0.5).to(dtype), seeded_normal(1, shape[-1], mean=0.5).to(dtype)
    check(rms_norm, x, weight, 1e-5, device=device, tolerance=GPU_KERNELS[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES[1:])
def test_layer_norm(device: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight, bias = (seeded_normal(i, *s, mean=0.5).to(dtype) for i, s in enumerate((shape, shape[-1:], shape[-1:])))
    check(layer_norm, x, weight, bias, 1e-5, device=device, tolerance=GPU_KERNELS[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_with_residual(device: str, dtype: torch.dtype) -> None:
    x, residual, weight, bias = (
        seeded_normal(i, *s, mean=0.5).to(dtype) for i, s in enumerate([(5, 77), (5, 77), (77,), (77,)])
    )
    check(add_rms_norm, x, residual, weight, 1e-6, device=device, tolerance=GPU_KERNELS[dtype])
    check(add_layer_norm, x, residual, weight, bias, 1e-6, device=device, tolerance=GPU_KERNELS[dtype])


def test_without_weights(device: str) -> None:
    x = seeded_normal(0, 3, 40, mean=0.5)
    check(rms_norm, x, None, 1e-6, device=device, tolerance=1e-6)
    check(layer_norm, x, None, None, 1e-6, device=device, tolerance=1e-6)
    check(add_rms_norm, x, x, None, 1e-6, device=device, tolerance=1e-6)


def test_rows_longer_than_a_block(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_block, "_LONGEST_WHOLE_ROW", 128)
    x, residual, weight, bias = (
        seeded_normal(i, *s, mean=0.5) for i, s in enumerate([(3, 200), (3, 200), (200,), (200,)])
    )
    check(rms_norm, x, weight, 1e-6, device=device, tolerance=1e-6)
    check(layer_norm, x, weight, bias, 1e-6, device=device, tolerance=1e-6)
    check(add_rms_norm, x, residual, weight, 1e-6, device=device, tolerance=1e-6)
    check(add_layer_norm, x, residual, weight, bias, 1e-6, device=device, tolerance=1e-6)


def test_layer_norm_keeps_digits_far_from_zero(device: str) -> None:
    x = 1000 + seeded_normal(0, 4, 96, mean=0.5)
    check(layer_norm, x, None, None, 1e-6, device=device, tolerance=1e-4)
