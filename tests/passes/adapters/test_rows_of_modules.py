"""Which modules' rows a weight has is read off its recipe, and said not to be known where it cannot be."""

from __future__ import annotations

import torch

from llmc.graph.model_graph import Adaptable
from llmc.graph.weights import Constant, Derived, Recipe, Stored
from llmc.passes.adapters.insert_adapters import modules_of_rows
from llmc.program.adapter_pools import RowRun

aten = torch.ops.aten
KNOWN = {f"layers.0.{name}": Adaptable(f"layers.0.{name}", 8, rows) for name, rows in (("q", 6), ("k", 2), ("v", 2))}


def stored(name: str) -> Stored:
    return Stored(f"model.layers.0.{name}.weight", torch.float32)


def merged(*parts: Recipe) -> Derived:
    return Derived(aten.cat.default, (parts, 0))


def test_merged_weights_have_a_part_for_each_module() -> None:
    codes = Constant(torch.zeros(2, 8, dtype=torch.int8), ("model.layers.0.v.weight",))
    modules = modules_of_rows(merged(merged(stored("q"), stored("k")), codes), KNOWN)
    assert [(m.name, m.end, m.rows) for m in modules if not isinstance(m, str)] == [
        ("layers.0.q", 6, (RowRun(0, 6),)),
        ("layers.0.k", 8, (RowRun(0, 2),)),
        ("layers.0.v", 10, (RowRun(0, 2),)),
    ]


def test_rows_in_another_order_are_runs() -> None:
    order = Constant(torch.tensor([0, 1, 4, 5, 2, 3]))
    modules = modules_of_rows(Derived(aten.index_select.default, (stored("q"), 0, order)), KNOWN)
    assert not isinstance(modules, str)
    (module,) = modules
    assert (module.end, module.rows) == (6, (RowRun(0, 2), RowRun(4, 2), RowRun(2, 2)))


def test_what_is_not_known_is_said() -> None:
    order = Constant(torch.tensor([0, 1]))
    mixed = Derived(aten.index_select.default, (merged(stored("q"), stored("k")), 0, order))
    assert modules_of_rows(mixed, KNOWN) == "rows of several modules are mixed"
    assert modules_of_rows(stored("gate"), KNOWN) == "layers.0.gate is not a linear layer of the model"
    assert (
        modules_of_rows(merged(stored("q"), stored("gate")), KNOWN)
        == "layers.0.gate is not a linear layer of the model"
    )
    both = Derived(aten.add.Tensor, (stored("q"), stored("k")))
    assert "made of 2 of the checkpoint's tensors" in str(modules_of_rows(both, KNOWN))
