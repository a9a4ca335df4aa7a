"""Keys assembled in pieces, tables read by index or gather, and complex rotations come out as plain ops."""

from __future__ import annotations

from typing import Any

import torch

from llmc.passes.canonical.join_parts import join_parts
from llmc.passes.canonical.normalize_lookups import normalize_lookups
from llmc.passes.canonical.unfold_complex import unfold_complex
from tests.passes.canonical.pattern_graphs import WIDTH, PatternGraph, refusals, rewritten

aten = torch.ops.aten


def test_slices_that_cover_a_tensor_are_joined_and_gaps_are_left() -> None:
    def assembled(x: Any) -> Any:
        first, last = aten.slice.Tensor(x, 1, 0, 3), aten.slice.Tensor(x, 1, 3, WIDTH)
        made = aten.slice_scatter.default(aten.zeros_like.default(x), first, 1, 0, 3)
        return aten.slice_scatter.default(made, last, 1, 3, WIDTH)

    def with_a_gap(x: Any) -> Any:
        first = aten.slice.Tensor(x, 1, 0, 3)
        return aten.slice_scatter.default(aten.zeros_like.default(x), first, 1, 0, 3)

    assert "aten.cat" in rewritten(PatternGraph(assembled), join_parts)
    assert refusals(PatternGraph(with_a_gap), join_parts) == []


def test_tables_are_looked_up() -> None:
    def body(x: Any, table: Any) -> Any:
        ids = aten.arange.default(aten.sym_size.int(x, 0))
        wide = aten.repeat.default(aten.unsqueeze.default(ids, 1), [1, WIDTH])
        rows = aten.add.Tensor(aten.index.Tensor(table, [ids]), aten.index_select.default(table, 0, ids))
        return aten.add.Tensor(x, aten.add.Tensor(rows, aten.gather.default(table, 0, wide)))

    text = rewritten(PatternGraph(body, table=(64, WIDTH)), normalize_lookups)
    assert "aten.embedding" in text
    assert not any(f"aten.{op}" in text for op in ("index", "gather"))


def test_numbers_of_chosen_channels_are_gathered() -> None:
    def body(x: Any, scale: Any) -> Any:
        largest = aten.topk.default(x, 2)
        scaled = aten.mul.Tensor(largest[0], aten.index.Tensor(scale, [largest[1]]))
        return aten.add.Tensor(x, aten.sum.dim_IntList(scaled, [1], True))

    text = rewritten(PatternGraph(body, scale=(WIDTH,)), normalize_lookups)
    assert "aten.gather" in text and "aten.index" not in text


def test_complex_rotations_of_something_else_are_refused() -> None:
    def body(x: Any, angles: Any) -> Any:
        pairs = aten.view_as_complex.default(aten.reshape.default(x, [-1, WIDTH // 2, 2]))
        turned = aten.mul.Tensor(pairs, aten.view_as_complex.default(angles))
        return aten.reshape.default(aten.view_as_real.default(turned), [-1, WIDTH])

    (reason,) = refusals(PatternGraph(body, angles=(1, WIDTH // 2, 2)), unfold_complex)
    assert "expected polar" in reason
