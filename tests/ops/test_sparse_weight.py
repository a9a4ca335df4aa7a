"""Masks and values say what a dense weight does, whatever its shape."""

from __future__ import annotations

import pytest
import torch

import llmc.ops  # noqa: F401  (registers the ops)

ops = torch.ops.llmc


@pytest.mark.parametrize("shape", [(1, 1), (3, 63), (5, 64), (2, 65), (33, 200)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_what_is_stored_comes_back(shape: tuple[int, int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(shape[1])
    weight = torch.randint(-3, 3, shape, generator=generator).clamp_min(0).to(dtype)
    count = int((weight != 0).sum())
    masks = ops.sparse_masks.default(weight)
    assert masks.dtype is torch.int64 and masks.shape == (shape[0], -(-shape[1] // 64))
    values = ops.sparse_values.default(weight, count + 3)
    assert values.tolist() == [*weight[weight != 0].tolist(), 0, 0, 0]
    assert torch.equal(ops.sparse_bitmask.default(values, masks, shape[1], dtype), weight)
    assert torch.equal(ops.pruned.default(torch.ones(shape), masks), (weight != 0).float())


def test_a_negative_zero_is_stored() -> None:
    weight = torch.tensor([[0.0, -0.0, 1.0]])
    values = ops.sparse_values.default(weight, 2)
    assert torch.signbit(values).tolist() == [True, False]


def test_more_elements_than_were_counted_are_an_error() -> None:
    with pytest.raises(ValueError, match="3 elements are not zero, but 2 were counted"):
        ops.sparse_values.default(torch.ones(1, 3), 2)


def test_codes_are_scaled() -> None:
    codes = torch.tensor([[0, 2, -3, 0]], dtype=torch.int8)
    scales = torch.tensor([[0.5, 2.0]])
    parts = ops.sparse_values.default(codes, 2), ops.sparse_masks.default(codes), scales
    assert ops.sparse_codes.default(*parts, 4, "int8", torch.float32).tolist() == [[0.0, 1.0, -6.0, 0.0]]
