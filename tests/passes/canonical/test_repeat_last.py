"""What is repeated on a first axis is computed once; writing a part of a tensor where it stands already is nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from llmc.passes.canonical.repeat_last import repeat_last
from tests.passes.canonical.pattern_graphs import WIDTH, PatternGraph, refusals, rewritten

aten = torch.ops.aten
FREQUENCIES = torch.arange(1.0, 1 + WIDTH)


def _rows(positions: Any) -> Any:
    """Positions in time, height and width, which are one of a text."""
    rows = aten.expand.default(aten.unsqueeze.default(positions, 0), [4, -1])
    return aten.slice.Tensor(rows, 0, 1, 4)


def _interleaved(values: Any, sections: Sequence[int]) -> Any:
    """Every third value from the second and the third row, written into the first as exports write."""
    for row in (1, 2):
        place = (1, row, 3 * sections[row], 3)
        first, other = aten.select.int(values, 0, 0), aten.select.int(values, 0, row)
        written = aten.slice_scatter.default(first, aten.slice.Tensor(other, *place), *place)
        values = aten.select_scatter.default(values, written, 0, 0)
    return aten.select.int(values, 0, 0)


@pytest.mark.parametrize("sections", [(4, 2, 2), (3, 3, 2), (2, 1, 1), (8, 0, 0), (11, 11, 10)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_interleaved_mrope(sections: Sequence[int], dtype: torch.dtype) -> None:
    def body(x: Any, positions: Any, frequencies: Any) -> Any:
        rows = aten._to_copy.default(aten.unsqueeze.default(_rows(positions), 2), dtype=torch.float32)
        angles = aten.cos.default(aten.mul.Tensor(rows, frequencies))
        return aten.mul.Tensor(x, aten._to_copy.default(_interleaved(angles, sections), dtype=dtype))

    text = rewritten(PatternGraph(body, dtype, frequencies=FREQUENCIES), repeat_last)
    assert not any(f"aten.{op}" in text for op in ("expand", "slice", "slice_scatter", "select"))
    assert text.count("aten.cos") == 1


def test_other_operands_have_one_on_the_axis_or_none() -> None:
    def body(x: Any, weight: Any) -> Any:
        rows = aten.expand.default(aten.tanh.default(aten.unsqueeze.default(x, 0)), [3, -1, -1])
        summed = aten.add.Tensor(aten.mul.Tensor(rows, rows), weight)
        return aten.select.int(aten.select.int(aten.unsqueeze.default(aten.mul.Tensor(summed, x), 1), 1, 0), 0, 2)

    assert "aten.expand" not in rewritten(PatternGraph(body, weight=(1, 1, WIDTH)), repeat_last)


def test_what_differs_along_the_axis_stays() -> None:
    def scaled(x: Any, weight: Any) -> Any:
        rows = aten.expand.default(aten.unsqueeze.default(x, 0), [3, -1, -1])
        return _interleaved(aten.mul.Tensor(rows, weight), (4, 2, 2))

    def moved(x: Any) -> Any:
        return aten.slice_scatter.default(x, aten.slice.Tensor(x, 1, 0, 4), 1, 1, 5)

    assert refusals(PatternGraph(scaled, weight=(3, 1, WIDTH)), repeat_last) == []
    assert refusals(PatternGraph(moved), repeat_last) == []


def test_a_number_has_no_axis_to_repeat() -> None:
    def body(x: Any, scale: Any) -> Any:
        return aten.mul.Tensor(x, aten.exp.default(scale))

    assert refusals(PatternGraph(body, scale=torch.tensor(0.5)), repeat_last) == []
