"""Stacked residual streams come apart, whatever is done with the stack; what is no small stack stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from llmc.passes.canonical.separate_streams import separate_streams
from tests.passes.canonical.pattern_graphs import WIDTH, PatternGraph, refusals, rewritten

aten = torch.ops.aten


def _stacked(x: Any, count: int = 3, dim: int = 0) -> Any:
    return aten.stack.default([aten.mul.Tensor(x, 1.0 + i) for i in range(count)], dim)


def _joined(streams: Any, dim: int = 0) -> Any:
    return aten.mean.dim(streams, [dim])


def _mixed(x: Any, coefficients: Any) -> Any:
    """AltUp's prediction: streams on the last axis, times a matrix of each token."""
    streams = _stacked(x)
    mixing = aten.reshape.default(aten.linear.default(x, coefficients), [-1, 3, 3])
    last = aten.transpose.int(aten.transpose.int(streams, 0, 1), 1, 2)
    back = aten.transpose.int(aten.transpose.int(aten.matmul.default(last, mixing), 0, 2), 1, 2)
    return _joined(aten.add.Tensor(back, streams))


def _corrected(x: Any, coefficients: Any) -> Any:
    """AltUp's correction: one innovation, with a number for each stream and token."""
    streams = _stacked(x)
    innovation = aten.expand.default(aten.unsqueeze.default(aten.tanh.default(x), 0), [3, -1, -1])
    of_each = aten.transpose.int(aten.linear.default(x, aten.slice.Tensor(coefficients, 0, 0, 3)), 0, 1)
    return _joined(aten.add.Tensor(aten.mul.Tensor(innovation, aten.unsqueeze.default(of_each, -1)), streams))


def _written(x: Any) -> Any:
    streams = _stacked(x, 4)
    others = aten.add.Tensor(aten.slice.Tensor(streams, 0, 1, 4), aten.tanh.default(x))
    written = aten.slice_scatter.default(streams, others, 0, 1, 9223372036854775807)
    again = aten.slice_scatter.default(written, aten.unsqueeze.default(aten.tanh.default(x), 0), 0, -1, 4)
    return aten.sum.dim_IntList(again, [0])


def _taken_of_each(x: Any) -> Any:
    """Channels of every stream, after an axis was put between."""
    wide = aten.unsqueeze.default(_stacked(x, 2, dim=1), 1)
    first = aten.select.int(wide, 3, 0)
    summed = _joined(aten.transpose.int(aten.select.int(first, 1, 0), 0, 1))
    return aten.add.Tensor(x, aten.unsqueeze.default(summed, -1))


def _scaled_by_weight(x: Any, weight: Any) -> Any:
    """A weight for each stream, one for all of them, and a number."""
    scaled = aten.mul.Tensor(_stacked(x), aten.unsqueeze.default(weight, 1))
    return _joined(aten.mul.Tensor(aten.add.Tensor(scaled, aten.select.int(weight, 0, 0)), 0.5))


def _beside(x: Any) -> Any:
    """Streams in the channels of a token."""
    apart = aten.tanh.default(aten.reshape.default(x, [-1, 2, WIDTH // 2]))
    mean = aten.mean.dim(apart, [-2])
    return aten.add.Tensor(x, aten.cat.default([mean, mean], -1))


def _hyper_connected(x: Any, coefficients: Any) -> Any:
    """Streams in the channels, mixed by a matrix of each token whose columns sum to 1."""
    mixing = aten.sigmoid.default(aten.reshape.default(aten.linear.default(x, coefficients), [-1, 2, 2]))
    mixing = aten.div.Tensor(mixing, aten.sum.dim_IntList(mixing, [-2], True))
    mixed = aten.matmul.default(mixing, aten.reshape.default(x, [-1, 2, WIDTH // 2]))
    return aten.reshape.default(mixed, [-1, WIDTH])


@pytest.mark.parametrize(
    ("body", "weights"),
    [
        (_mixed, {"coefficients": (9, WIDTH)}),
        (_corrected, {"coefficients": (9, WIDTH)}),
        (_written, {}),
        (_beside, {}),
        (_hyper_connected, {"coefficients": (4, WIDTH)}),
        (_taken_of_each, {}),
        (_scaled_by_weight, {"weight": (3, WIDTH)}),
    ],
)
def test_streams_come_apart(body: Callable[..., Any], weights: dict[str, Any]) -> None:
    text = rewritten(PatternGraph(body, **weights), separate_streams)
    assert not any(f"aten.{op}" in text for op in ("matmul", "slice_scatter", "expand", "mean", "sum"))
    # What reads the channels of all streams joins them again.
    assert ("aten.stack" in text) is (body is _hyper_connected)


@pytest.mark.parametrize("queries", [1, 2])
def test_attention_of_a_token_over_its_streams(queries: int) -> None:
    def body(x: Any, q: Any) -> Any:
        streams = aten.reshape.default(aten.tanh.default(x), [-1, 4, WIDTH // 4])
        asked = aten.expand.default(aten.unsqueeze.default(q, 0), [aten.sym_size.int(x, 0), -1, -1])
        y = aten.scaled_dot_product_attention.default(asked, streams, streams, scale=0.5)
        return aten.reshape.default(aten.cat.default([y] * (4 // queries), 1), [-1, WIDTH])

    text = rewritten(PatternGraph(body, q=(queries, WIDTH // 4)), separate_streams)
    assert not any(f"aten.{op}" in text for op in ("scaled_dot_product_attention", "matmul", "expand"))


def test_other_stacks_stay() -> None:
    def many(x: Any) -> Any:
        return _joined(aten.tanh.default(_stacked(x, 9)))

    def pairs(x: Any) -> Any:
        halves = [aten.slice.Tensor(x, 1, start, WIDTH, 2) for start in (1, 0)]
        return aten.reshape.default(aten.stack.default(halves, -1), [-1, WIDTH])

    for body in (many, pairs):
        assert refusals(PatternGraph(body), separate_streams) == []
