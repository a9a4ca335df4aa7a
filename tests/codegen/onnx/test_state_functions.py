"""Functions of ops with states against their references: whole sequences, and steps of requests that begin or go on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.codegen.onnx.calls import check, numbers, ops

pytest.importorskip("onnxruntime", exc_type=ImportError)
TOKENS = 8
# Of three requests, the second of which begins, whose states are in slots that lie elsewhere; two slots are nobody's.
STEP: tuple[Tensor, ...] = tuple(
    torch.tensor(column, dtype=torch.int32) for column in ([0, 1, 6, 8], [4, 5, 30], [3, 0, 4])
)


def states(*shape: int) -> Tensor:
    """Of five slots; nothing may read what the second request left, nor slots of nobody."""
    slots = numbers(5, *shape, seed=9)
    slots[:3] = torch.nan
    return slots


def rows(*shape: int, seed: int = 0) -> Tensor:
    return numbers(TOKENS, *shape, seed=seed)


@pytest.mark.parametrize("bias", [None, numbers(6, seed=2)])
@pytest.mark.parametrize("width", [2, 4])
def test_causal_conv(width: int, bias: Tensor | None) -> None:
    x, weight = rows(6), numbers(width, 6, seed=1)
    check(ops.causal_conv.default, x, weight, bias)
    check(ops.causal_conv_with_state.default, x, weight, bias, states(width - 1, 6), *STEP)


def test_selective_scan() -> None:
    given = rows(6), rows(6, seed=1).abs(), -numbers(6, 3, seed=2).abs(), rows(3, seed=3), rows(3, seed=4)
    check(ops.selective_scan.default, *given)
    check(ops.selective_scan_with_state.default, *given, states(6, 3), *STEP)


@pytest.mark.parametrize("decay", [(4,), (4, 3)], ids=["of heads", "of channels"])
@pytest.mark.parametrize("beta", [None, rows(4, seed=4).sigmoid()], ids=["gated", "delta"])
@pytest.mark.parametrize("groups", [2, 4])
def test_linear_attention(groups: int, beta: Tensor | None, decay: tuple[int, ...]) -> None:
    given: tuple[Any, ...] = rows(groups, 3), rows(groups, 3, seed=1), rows(4, 5, seed=2), -rows(*decay, seed=3).abs()
    check(ops.linear_attention.default, *given, beta)
    check(ops.linear_attention_with_state.default, *given, beta, states(4, 3, 5), *STEP)


@pytest.mark.parametrize(("tropical", "initial"), [(False, 0.0), (True, -1e38)])
def test_linear_recurrence(tropical: bool, initial: float) -> None:
    given = rows(6), rows(6, seed=1).sigmoid(), initial, tropical
    check(ops.linear_recurrence.default, *given)
    check(ops.linear_recurrence_with_state.default, *given, states(6), *STEP)
