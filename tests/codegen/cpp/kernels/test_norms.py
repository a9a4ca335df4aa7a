"""llmc_rms_norm and llmc_layer_norm against their references, with and without a residual sum."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from llmc.ops.layer_norm import add_layer_norm, layer_norm
from llmc.ops.rms_norm import add_rms_norm, rms_norm
from llmc.targets import CpuTarget
from tests.codegen.cpp.kernel_calls import call, pointer, rows
from tests.codegen.cpp.runnable_targets import RUNNABLE
from tests.tolerances import ELEMENTS

DTYPES = [torch.float32, torch.bfloat16]
# The last is over the size from which several threads take part.
SHAPES = [(1, 1), (3, 7), (5, 31), (2, 129), (4, 768), (67, 577)]
EPS = 1e-5


@pytest.mark.parametrize("target", RUNNABLE)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_reference(
    target: CpuTarget, dtype: torch.dtype, affine: bool, name: str, shape: tuple[int, int]
) -> None:
    tokens, channels = shape
    x, weight, bias = _inputs(tokens, channels, dtype, affine)
    y = torch.empty_like(x)
    call(target, name, [dtype], _norm(x, weight, bias if name == "layer_norm" else None, y))
    expected = rms_norm(x, weight, EPS) if name == "rms_norm" else layer_norm(x, weight, bias, EPS)
    torch.testing.assert_close(y, expected, rtol=ELEMENTS[dtype], atol=2 * ELEMENTS[dtype])


@pytest.mark.parametrize("target", RUNNABLE)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize("shape", SHAPES)
def test_residual_is_added_and_rounded_first(
    target: CpuTarget, dtype: torch.dtype, name: str, shape: tuple[int, int]
) -> None:
    x, weight, bias = _inputs(*shape, dtype, affine=True)
    residual = torch.randn_like(x)
    expected, expected_sum = (
        add_rms_norm(x, residual, weight, EPS) if name == "rms_norm" else add_layer_norm(x, residual, weight, bias, EPS)
    )
    y, total = torch.empty_like(x), residual  # the sum may take the residual's place
    call(target, name, [dtype], _norm(x, weight, bias if name == "layer_norm" else None, y, residual, total))
    torch.testing.assert_close(total, expected_sum, rtol=0, atol=0)
    torch.testing.assert_close(y, expected, rtol=ELEMENTS[dtype], atol=2 * ELEMENTS[dtype])


@pytest.mark.parametrize("target", RUNNABLE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_inside_a_merged_row(target: CpuTarget, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    merged = torch.randn(5, 100, generator=generator).to(dtype)
    x = merged[:, 10:82].unflatten(1, (3, 24))
    weight = torch.randn(24, generator=generator)
    y = torch.empty(5, 3, 24, dtype=dtype)
    call(target, "rms_norm", [dtype], _norm(x, weight, None, y) | {"groups": 3, "channels": 24})
    torch.testing.assert_close(y, rms_norm(x, weight, EPS), rtol=ELEMENTS[dtype], atol=ELEMENTS[dtype])


@pytest.mark.parametrize("target", RUNNABLE)
@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_a_row_does_not_depend_on_its_neighbours(target: CpuTarget, name: str) -> None:
    x, weight, _ = _inputs(131, 300, torch.float32, affine=True)
    together = torch.empty_like(x)
    call(target, name, [torch.float32], _norm(x, weight, None, together))
    alone = torch.empty_like(x[77:78])
    call(target, name, [torch.float32], _norm(x[77:78], weight, None, alone), threads=1)
    assert torch.equal(alone, together[77:78])


def _inputs(
    tokens: int, channels: int, dtype: torch.dtype, affine: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    generator = torch.Generator().manual_seed(tokens * channels)
    x = (torch.randn(tokens, channels, generator=generator) + 0.5).to(dtype)
    if not affine:
        return x, None, None
    return x, torch.randn(channels, generator=generator), torch.randn(channels, generator=generator)


def _norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    y: Tensor,
    residual: Tensor | None = None,
    total: Tensor | None = None,
) -> dict[str, Any]:
    return {
        "tokens": x.shape[0],
        "groups": 1,
        "channels": x.shape[1],
        "x": rows(x),
        "residual": rows(residual),
        "weight": pointer(weight),
        "bias": pointer(bias),
        "eps": EPS,
        "y": rows(y),
        "sum": rows(total),
    }
