"""The likeliest tokens of rows of logits on the device, as the reference finds them."""

from __future__ import annotations

import pytest
import torch

from llmc.codegen.triton.kernels.sampling.top_tokens import top_tokens
from tests.codegen.triton.tensor_call import check


@pytest.mark.parametrize("vocabulary", [1, 7, 2048, 4097])
@pytest.mark.parametrize("count", [1, 10])
def test_equals_the_reference(device: str, vocabulary: int, count: int) -> None:
    check(top_tokens, _logits(3, vocabulary), min(count, vocabulary), None, device=device, tolerance=2e-6)


def test_equals_are_taken_by_place_and_told_by_the_map(device: str) -> None:
    logits = _logits(2, 300).round()
    logits[1] = -2.0
    token_map = torch.randperm(5000, generator=torch.Generator().manual_seed(3))[:300].int()
    check(top_tokens, logits, 12, token_map, device=device, tolerance=2e-6)


def _logits(rows: int, vocabulary: int) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(vocabulary)) * 3
