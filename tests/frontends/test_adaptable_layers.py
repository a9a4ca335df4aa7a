"""Which weights adapters may change: those that one product multiplies, from either side."""

from __future__ import annotations

from typing import Any

import torch

from llmc.frontends.adapters.adaptable_layers import adaptable_layers
from llmc.graph.model_graph import Adaptable
from tests.passes.canonical.pattern_graphs import WIDTH, PatternGraph

aten = torch.ops.aten


def test_weights_on_the_right_are_their_own_way_round() -> None:
    def body(x: Any, up: Any, down: Any, twice: Any, bias: Any) -> Any:
        inner = aten.addmm.default(bias, aten.linear.default(x, up), down)
        return aten.mm.default(aten.mm.default(inner, twice), aten.transpose.int(twice, 0, 1))

    made = PatternGraph(body, up=(12, WIDTH), down=(12, WIDTH), twice=(WIDTH, 5), bias=(WIDTH,))
    assert adaptable_layers(made.graph) == (Adaptable("up", WIDTH, 12), Adaptable("down", 12, WIDTH))
