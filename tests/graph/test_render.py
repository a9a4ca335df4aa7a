"""Graphs as text: equal graphs give equal text, whatever torch called their symbols."""

from __future__ import annotations

from collections.abc import Callable

import torch

from llmc.graph.render import op_name, render, render_recipe
from llmc.graph.weights import Constant, Derived, Stored
from llmc.options import BuildOptions
from llmc.passes.pipeline import fusion, serving
from llmc.passes.runner import run_pipeline
from tests.graph_builder import llama

Golden = Callable[[str, str], None]


def test_stages_render_with_their_symbols(golden: Golden) -> None:
    graph, _ = llama(layers=1)
    golden("graph/render_canonical.txt", render(graph))
    golden("graph/render_optimized.txt", render(run_pipeline(graph, (*serving(), *fusion()), BuildOptions()).graph))


def test_equal_graphs_give_equal_text() -> None:
    first, _ = llama()
    second, _ = llama()
    assert render(first) == render(second) == render(first.copy())


def test_recipes_render_as_the_calls_that_make_them() -> None:
    stored = Stored("model.norm.weight", torch.bfloat16)
    assert render_recipe(stored) == "weight 'model.norm.weight'"
    assert render_recipe(Constant(torch.zeros(2, 3))) == "constant float32[2, 3]"
    wide = Derived(torch.ops.aten._to_copy.default, (stored,), (("dtype", torch.float32),))
    folded = Derived(torch.ops.aten.add.Tensor, (wide, 1.0))
    assert render_recipe(folded) == "aten.add.Tensor(aten._to_copy(weight 'model.norm.weight', dtype=float32), 1.0)"
    joined = Derived(torch.ops.aten.cat.default, ((stored, stored), 0))
    assert render_recipe(joined) == "aten.cat([weight 'model.norm.weight', weight 'model.norm.weight'], 0)"


def test_ops_are_named_without_the_default_overload() -> None:
    assert op_name(torch.ops.llmc.rms_norm.default) == "llmc.rms_norm"
    assert op_name(torch.ops.aten.mul.Tensor) == "aten.mul.Tensor"
