"""Rewrites that drop an argument, and are right for one value of it, are disproved; so are those for one shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from llmc.debug.prove.verdict import Outcome, prove
from llmc.passes import Rewrite

aten, ops = torch.ops.aten, torch.ops.llmc


def _softmax(x: Any, dim: Any) -> Any:
    return aten.softmax.int(x, dim)


def _rope(x: Any, cos: Any, sin: Any, interleaved: Any) -> Any:
    return ops.rope.default(x, cos, sin, interleaved)


def _gelu(x: Any, approximate: Any) -> Any:
    return aten.gelu.default(x, approximate=approximate)


def _gated(gate: Any, up: Any, activation: Any) -> Any:
    return ops.gated_activation.default(gate, up, activation)


def _largest(x: Any, keepdim: Any) -> Any:
    return aten.amax.default(x, [-1], keepdim)


def _sum_of_both(x: Any, y: Any) -> Any:
    return aten.sum.dim_IntList(aten.add.Tensor(x, y), [0], True)


def _sums(x: Any, y: Any) -> Any:
    return aten.add.Tensor(aten.sum.dim_IntList(x, [0], True), aten.sum.dim_IntList(y, [0], True))


def _attention(q: Any, k: Any, v: Any, scale: Any, softcap: Any) -> Any:
    return ops.attention.default(q, k, v, scale, None, softcap)


def _windowed(q: Any, k: Any, v: Any, scale: Any, window: Any) -> Any:
    return ops.attention.default(q, k, v, scale, window)


WRONG: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "dim": (_softmax, lambda x: aten.softmax.int(x, 0)),
    "last dim": (_softmax, lambda x: aten.softmax.int(x, -1)),
    "interleaved": (_rope, lambda x, cos, sin: ops.rope.default(x, cos, sin, False)),
    "approximate": (_gelu, lambda x: aten.gelu.default(x)),
    "activation": (_gated, lambda gate, up: ops.gated_activation.default(gate, up, "tanh")),
    "keepdim": (_largest, lambda x: aten.amax.default(x, [-1], False)),
    "broadcast": (_sum_of_both, _sums),
    "softcap": (_attention, lambda q, k, v, scale: ops.attention.default(q, k, v, scale)),
    "window": (_windowed, lambda q, k, v, scale: ops.attention.default(q, k, v, scale)),
}


@pytest.mark.parametrize("dropped", WRONG)
def test_what_is_dropped_is_missed(dropped: str) -> None:
    pattern, replacement = WRONG[dropped]
    verdict = prove(Rewrite("drops", (pattern,), replacement))
    assert verdict.outcome is Outcome.DISPROVED, verdict
    assert prove(Rewrite("keeps", (pattern,), pattern)).outcome is Outcome.PROVED


def test_the_value_is_named() -> None:
    pattern, replacement = WRONG["keepdim"]
    verdict = prove(Rewrite("drops", (pattern,), replacement))
    assert str(verdict) == "disproved: the replacement of float32[2, 1] is float32[2], with keepdim = True"
    pattern, replacement = WRONG["interleaved"]
    verdict = prove(Rewrite("drops", (pattern,), replacement))
    assert str(verdict).endswith(", with interleaved = True")
