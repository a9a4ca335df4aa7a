"""scaled_dot_product_attention becomes llmc.attention if it is causal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from llmc.passes.fusion.from_aten.fuse_sdpa_attention import fuse_sdpa_attention
from tests.passes.canonical.pattern_graphs import WIDTH, PatternGraph, refusals, rewritten

aten = torch.ops.aten
Golden = Callable[[str, str], None]


def heads(x: Any, count: int = 2) -> Any:
    """[T, WIDTH] as [count, T, WIDTH / 2], the first heads."""
    split = aten.reshape.default(x, [-1, 2, WIDTH // 2])
    return aten.transpose.int(aten.slice.Tensor(split, 1, 0, count), 0, 1)


def flat(x: Any) -> Any:
    return aten.reshape.default(aten.transpose.int(x, 0, 1), [-1, WIDTH])


def _attend(x: Any, *args: Any, **kwargs: Any) -> Any:
    return flat(aten.scaled_dot_product_attention.default(heads(x), heads(x), heads(x), *args, **kwargs))


def causal(x: Any) -> Any:
    return _attend(x, None, 0.0, True)


def scaled(x: Any) -> Any:
    return _attend(x, None, 0.0, True, scale=0.3)


def compared(x: Any, positions: Any) -> Any:
    row, column = aten.unsqueeze.default(positions, 0), aten.unsqueeze.default(positions, 1)
    return _attend(x, aten.unsqueeze.default(aten.le.Tensor(row, column), 0))


def windowed(x: Any, positions: Any) -> Any:
    row, column = aten.unsqueeze.default(positions, 0), aten.unsqueeze.default(positions, 1)
    near = aten.lt.Scalar(aten.sub.Tensor(column, row), 3)
    return _attend(x, aten.bitwise_and.Tensor(aten.le.Tensor(row, column), near))


def grouped(x: Any) -> Any:
    return flat(
        aten.scaled_dot_product_attention.default(heads(x), heads(x, 1), heads(x, 1), None, 0.0, True, enable_gqa=True)
    )


def repeated(x: Any) -> Any:
    k = aten.repeat_interleave.self_int(heads(x, 1), 2, 0)
    spread = aten.expand.default(aten.unsqueeze.default(heads(x, 1), 1), [1, 2, -1, 4])
    v = aten.reshape.default(spread, [2, -1, 4])
    return flat(aten.scaled_dot_product_attention.default(heads(x), k, v, None, 0.0, True))


@pytest.mark.parametrize("body", [causal, scaled, compared, windowed, grouped, repeated])
def test_fuses(body: Callable[..., Any], golden: Golden) -> None:
    golden(f"passes/fuse_sdpa_{body.__name__}.txt", rewritten(PatternGraph(body), fuse_sdpa_attention))


def test_refuses_attention_without_a_mask() -> None:
    reasons = refusals(PatternGraph(lambda x: _attend(x)), fuse_sdpa_attention)
    assert reasons == ["the attention is not causal: is_causal is False and it has no mask"]


def test_refuses_dropout() -> None:
    reasons = refusals(PatternGraph(lambda x: _attend(x, None, 0.1, True)), fuse_sdpa_attention)
    assert reasons == ["the attention drops out 0.1 of its weights"]


def test_refuses_another_number_of_keys() -> None:
    def body(x: Any) -> Any:
        keys = aten.cat.default([heads(x), heads(x)], 1)
        return flat(aten.scaled_dot_product_attention.default(heads(x), keys, keys, None, 0.0, True))

    (reason,) = refusals(PatternGraph(body), fuse_sdpa_attention)
    assert reason.endswith("expected equal numbers of keys and queries")


def test_refuses_a_batch_axis() -> None:
    def body(x: Any) -> Any:
        batched = aten.unsqueeze.default(heads(x), 0)
        y = aten.scaled_dot_product_attention.default(batched, batched, batched, None, 0.0, True)
        return flat(aten.squeeze.dim(y, 0))

    (reason,) = refusals(PatternGraph(body), fuse_sdpa_attention)
    assert reason.endswith("expected [heads, tokens, channels] each")
