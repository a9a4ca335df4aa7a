"""Activations rounded token by token."""

from __future__ import annotations

import pytest
import torch

from llmc.ops.token_codes import token_codes, token_values


@pytest.mark.parametrize(("format", "error"), [("int8", 0.5 / 127), ("fp8", 16 / 448)])
def test_every_token_has_its_own_scale(format: str, error: float) -> None:
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(0)) * torch.tensor([[1e-3], [1], [50], [1], [7]])
    codes, scales = token_codes(x, None, format)
    largest = x.abs().amax(-1, keepdim=True)
    assert bool(((token_values(codes, scales, format) - x).abs() <= largest * error * 1.001).all())
    assert scales.shape == (5, 1)


def test_a_token_of_zeros_has_codes_of_zero() -> None:
    codes, scales = token_codes(torch.zeros(1, 8), None, "int8")
    assert not codes.any()
    assert not scales.any()


def test_a_static_scale_saturates() -> None:
    codes, scales = token_codes(torch.tensor([[0.5, -300.0, 300.0]]), torch.tensor([1.0]), "int8")
    assert codes.tolist() == [[0, -127, 127]]
    assert scales.tolist() == [[1.0]]


@pytest.mark.parametrize("format", ["int8", "fp8"])
@pytest.mark.parametrize("static", [None, torch.tensor([0.1])])
def test_codes_do_not_hide_a_nan(format: str, static: torch.Tensor | None) -> None:
    x = torch.ones(3, 40)
    x[1, 17] = float("nan")
    values = token_values(*token_codes(x, static, format), format)
    assert values[1].isnan().all()
    assert values[::2].isfinite().all()


def test_the_op_is_the_function() -> None:
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    values = torch.ops.llmc.round_tokens.default(x, None, "int8", torch.bfloat16)
    assert values.dtype is torch.bfloat16
    torch.testing.assert_close(values.float(), token_values(*token_codes(x, None, "int8"), "int8"), rtol=1e-2, atol=0)
