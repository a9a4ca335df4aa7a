"""What routers do to scores comes out in llmc's spelling, and what is no router's is left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from llmc.passes.canonical.normalize_routing import normalize_routing
from tests.passes.canonical.pattern_graphs import PatternGraph, refusals, rewritten

aten = torch.ops.aten
Golden = Callable[[str, str], None]


def test_scores_are_chosen_in_groups_taken_and_marked(golden: Golden) -> None:
    """As DeepSeek-V3 routes: the best groups by their two best channels, then the best channels within those."""

    def body(x: Any) -> Any:
        scores = aten.softmax.int(x, -1)
        of_groups = aten.topk.default(aten.reshape.default(scores, [-1, 2, 4]), 2)[0]
        groups = aten.topk.default(aten.sum.dim_IntList(of_groups, [-1]), 1)[1]
        mask = aten.scatter.value(aten.zeros_like.default(aten.sum.dim_IntList(of_groups, [-1])), 1, groups, 1.0)
        wide = aten.reshape.default(aten.expand.default(aten.unsqueeze.default(mask, 2), [-1, 2, 4]), [-1, 8])
        chosen = aten.topk.default(aten.mul.Tensor(scores, wide), 2, -1, True, False)[1]
        taken = aten.gather.default(scores, 1, chosen)
        return aten.mul.Tensor(x, aten.sum.dim_IntList(taken, [-1], True))

    golden("passes/normalize_routing.txt", rewritten(PatternGraph(body), normalize_routing))


def test_the_smallest_and_other_axes_are_left() -> None:
    def smallest(x: Any) -> Any:
        return aten.mul.Tensor(x, aten.sum.dim_IntList(aten.topk.default(x, 2, -1, False)[0], [-1], True))

    def across(x: Any) -> Any:
        largest = aten.topk.default(aten.reshape.default(x, [-1, 2, 4]), 1, 1)[0]
        return aten.cat.default([aten.reshape.default(largest, [-1, 4]), aten.slice.Tensor(x, 1, 0, 4)], 1)

    assert refusals(PatternGraph(smallest), normalize_routing) == ["it does not take the largest"]
    assert "another axis" in refusals(PatternGraph(across), normalize_routing)[0]
