"""What export leaves behind goes, and what looks like it stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from llmc.passes.canonical.remove_export_residue import remove_export_residue
from tests.passes.canonical.pattern_graphs import WIDTH, PatternGraph, refusals, rewritten

aten = torch.ops.aten
Golden = Callable[[str, str], None]


def test_removes_everything_that_changes_nothing(golden: Golden) -> None:
    def body(x: Any) -> Any:
        aten._assert_tensor_metadata.default(x, None, None, torch.float32)
        for op in (aten.clone.default, aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default):
            x = op(x)
        x = aten.dropout.default(x, 0.1, False)
        x = aten._to_copy.default(x, dtype=torch.float32)
        x = aten.type_as.default(x, x)
        x = aten.expand.default(aten.slice.Tensor(x, 1, 0, 9223372036854775807), [-1, WIDTH])
        x = aten.permute.default(aten.view.default(x, [-1, WIDTH]), [0, 1])
        x = aten.transpose.int(x, 1, -1)
        x = aten.add.Tensor(aten.div.Tensor(aten.mul.Tensor(x, 1.0), 1), 0)
        return aten.cat.default([x, aten.slice.Tensor(x, 1, WIDTH, WIDTH)], 1)

    golden("passes/remove_export_residue.txt", rewritten(PatternGraph(body), remove_export_residue))


def test_spells_casts_one_way() -> None:
    def body(x: Any, weight: Any) -> Any:
        wide = aten.type_as.default(aten.to.dtype(x, torch.float32), weight)
        return aten.to.dtype(aten.mul.Tensor(wide, weight), torch.bfloat16)

    made = PatternGraph(body, torch.bfloat16, weight=torch.ones(WIDTH))
    text = rewritten(made, remove_export_residue)
    assert text.count("aten._to_copy") == 2
    assert "type_as" not in text and "aten.to" not in text


def test_axes_that_stay_are_not_counted() -> None:
    def body(x: Any) -> Any:
        heads = aten.reshape.default(x, [-1, 2, 4])
        spread = aten.expand.default(aten.slice.Tensor(heads, 1, 0, 1), [aten.sym_size.int(heads, 0), 2, 4])
        return aten.reshape.default(spread, [-1, WIDTH])

    text = rewritten(PatternGraph(body), remove_export_residue)
    assert "[-1, 2, -1]" in text and "sym_size" not in text


@pytest.mark.parametrize(
    "body",
    [
        lambda x: aten.reshape.default(aten.transpose.int(aten.reshape.default(x, [-1, 2, 4]), 1, 2), [-1, WIDTH]),
        lambda x: aten._to_copy.default(aten._to_copy.default(x, dtype=torch.bfloat16), dtype=torch.float32),
        lambda x: aten.mul.Tensor(x, 1.5),
        lambda x: aten.cat.default([aten.slice.Tensor(x, 1, 4, 8), aten.slice.Tensor(x, 1, 0, 4)], 1),
    ],
)
def test_leaves_what_changes_something(body: Callable[..., Any]) -> None:
    assert refusals(PatternGraph(body), remove_export_residue) == []
