"""NaN and Inf are found by their bits, whatever the dtype and the sign, and nothing else is."""

from __future__ import annotations

import math

import pytest
import torch

from llmc.graph.finite_weights import FiniteWeights

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
def test_each_is_found_and_counted(dtype: torch.dtype, bad: float) -> None:
    weight = torch.randn(300, 1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight[299, 998:] = bad
    finite = FiniteWeights()
    assert finite.look(("w",), weight) is weight
    assert finite.notes() == (
        f"1 weight holds numbers that are not finite: w (2 {'NaN' if math.isnan(bad) else 'Inf'})",
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_and_smallest_numbers_are_finite(dtype: torch.dtype) -> None:
    limits = torch.finfo(dtype)
    values = torch.tensor([limits.max, limits.min, limits.tiny, -limits.tiny, 0.0, -0.0], dtype=dtype)
    finite = FiniteWeights()
    finite.look(("w",), values)
    finite.look(("empty",), values[:0])
    finite.look(("transposed",), torch.ones(3, 5, dtype=dtype).t())
    finite.look((), torch.tensor([math.inf], dtype=dtype))  # Computed, not stored.
    finite.look(("codes",), torch.tensor([1, 2], dtype=torch.int8))
    assert finite.notes() == ()
