"""llmc_top_tokens against llmc::top_tokens: ids in order, log-probabilities, ties, and truncated vocabularies."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from llmc.ops.top_tokens import MOST_TOKENS, top_tokens
from llmc.targets import CpuTarget
from tests.codegen.cpp.kernel_calls import call, pointer, rows
from tests.codegen.cpp.runnable_targets import RUNNABLE


@pytest.mark.parametrize("target", RUNNABLE)
@pytest.mark.parametrize(("count", "vocabulary"), [(1, 1), (10, 10), (10, 37), (MOST_TOKENS, 4099)])
def test_equals_the_reference(target: CpuTarget, count: int, vocabulary: int) -> None:
    torch.manual_seed(vocabulary)
    _check(target, torch.randn(5, vocabulary + 3)[:, 1:-2] * 4, count, None)


@pytest.mark.parametrize("target", RUNNABLE)
def test_of_equals_the_lower_place_comes_first(target: CpuTarget) -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 500).round()
    logits[1] = -2.0
    logits[2, 17] = float("-inf")
    _check(target, logits, 20, None)


@pytest.mark.parametrize("target", RUNNABLE)
def test_tokens_of_a_truncated_vocabulary_are_told_by_its_map(target: CpuTarget) -> None:
    torch.manual_seed(1)
    _check(target, torch.randn(3, 64), 7, torch.randperm(4000)[:64].int())


def _check(target: CpuTarget, logits: Tensor, count: int, token_map: Tensor | None) -> None:
    ids = torch.full((len(logits), count + 2), -7, dtype=torch.int32)
    logprobs = torch.full((len(logits), count + 2), float("nan"))
    values = {
        "rows": len(logits),
        "vocabulary": logits.shape[1],
        "count": count,
        "logits": rows(logits),
        "token_map": pointer(token_map),
        "ids": rows(ids[:, 1:-1]),
        "logprobs": rows(logprobs[:, 1:-1]),
    }
    call(target, "top_tokens", [torch.float32], values)
    wanted_ids, wanted_logprobs = top_tokens(logits, count, token_map)
    assert torch.equal(ids[:, 1:-1], wanted_ids)
    torch.testing.assert_close(logprobs[:, 1:-1], wanted_logprobs, rtol=0, atol=2e-6)
    assert (ids[:, [0, -1]] == -7).all() and logprobs[:, [0, -1]].isnan().all()
