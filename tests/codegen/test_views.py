"""Views become strides; only what strides cannot say is copied; what mixes tokens is refused."""

from __future__ import annotations

import operator
from typing import Any

import pytest
from torch import fx

from llmc.codegen.views import View, find_views
from llmc.errors import LoweringError
from llmc.program import RowCount
from tests.codegen.tiny_models import VOCABULARY, GraphBuilder, aten, ops

T = RowCount.TOKENS


def start() -> tuple[GraphBuilder, fx.Node]:
    b = GraphBuilder()
    return b, b.call(ops.embedding.default, b.inputs["input_ids"], b.weight("embed", VOCABULARY, 48))


def viewed(b: GraphBuilder, node: fx.Node) -> tuple[View, bool]:
    """The node's view, and whether its input is copied."""
    model, _ = b.finish(node)
    views, copies = find_views(model)
    view = views[node]
    assert isinstance(view, View)
    return view, node in copies


def test_a_slice_of_heads() -> None:
    b, x = start()
    part = b.call(aten.slice.Tensor, x, 1, 24, 48)
    view, copied = viewed(b, b.call(aten.reshape.default, part, [-1, 2, 12]))
    assert (view.value.node, view.offset, view.shape, view.strides) == (x, 24, (T, 2, 12), (48, 12, 1))
    assert not copied


@pytest.mark.parametrize(
    ("op", "arguments", "shape", "strides", "offset"),
    [
        (aten.select.int, (1, 7), (T,), (48,), 7),
        (aten.unsqueeze.default, (1,), (T, 1, 48), (48, 48, 1), 0),
        (aten.transpose.int, (0, 1), (48, T), (1, 48), 0),
        (aten.slice.Tensor, (1, 1, 48, 2), (T, 24), (48, 2), 1),
    ],
)
def test_strides_of_views(op: Any, arguments: Any, shape: Any, strides: Any, offset: int) -> None:
    b, x = start()
    view, _ = viewed(b, b.call(op, x, *arguments))
    assert (view.shape, view.strides, view.offset) == (shape, strides, offset)


def test_parts_of_a_split() -> None:
    b, x = start()
    parts = b.call(aten.split_with_sizes.default, x, [8, 40], 1)
    view, _ = viewed(b, b.call(operator.getitem, parts, 1))
    assert (view.value.node, view.offset, view.shape, view.strides) == (x, 8, (T, 40), (48, 1))


def test_a_transposed_reshape_copies() -> None:
    b, x = start()
    heads = b.call(aten.reshape.default, x, [-1, 4, 12])
    turned = b.call(aten.transpose.int, heads, 1, 2)
    view, copied = viewed(b, b.call(aten.reshape.default, turned, [-1, 48]))
    assert copied
    assert view.value.shape == (T, 12, 4)
    assert view.strides == (48, 1)


def test_a_computed_value_with_tokens_inside_has_them_outermost() -> None:
    b, x = start()
    turned = b.call(aten.transpose.int, x, 0, 1)
    view, _ = viewed(b, b.call(aten.tanh.default, turned))
    assert (view.shape, view.strides) == ((48, T), (1, 48))


def test_copies_of_layout_only_are_read_through() -> None:
    b, x = start()
    view, _ = viewed(b, b.call(aten.clone.default, b.call(aten.transpose.int, x, 0, 1)))
    assert view.value.node is x


@pytest.mark.parametrize(
    ("op", "arguments", "problem"),
    [
        (aten.reshape.default, ([-1, 12],), "mixes tokens with another axis"),
        (aten.slice.Tensor, (0, 1, 9223372036854775807), "tokens"),
    ],
)
def test_what_mixes_tokens_is_refused(op: Any, arguments: Any, problem: str) -> None:
    b, x = start()
    with pytest.raises(LoweringError, match=problem):
        viewed(b, b.call(op, x, *arguments))
