"""Fake values of new nodes: shared by equal calls, and only by those."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from llmc.errors import PassError
from llmc.graph.fake_value import FakeValues
from llmc.options import BuildOptions
from llmc.passes.pipeline import default
from llmc.passes.runner import run_pipeline
from tests.graph_builder import llama

aten = torch.ops.aten


class Calls:
    """A graph of calls on fake placeholders, and its fake values."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.mode = FakeTensorMode(shape_env=ShapeEnv())
        self.values = FakeValues()

    def input(self, *shape: int, dtype: torch.dtype = torch.float32) -> fx.Node:
        node = self.graph.placeholder("x")
        with self.mode:
            node.meta["val"] = torch.empty(shape, dtype=dtype)
        return node

    def value(self, target: Any, *args: Any) -> Any:
        return self.values.of(self.graph.call_function(target, args))


def test_equal_calls_share_a_value() -> None:
    calls = Calls()
    first = calls.value(aten.mul.Tensor, calls.input(3, 4), calls.input(4))
    assert calls.value(aten.mul.Tensor, calls.input(3, 4), calls.input(4)) is first
    assert tuple(first.shape) == (3, 4)


def test_copies_of_a_model_share_values() -> None:
    """Passes that run over it again ask no op anew."""
    graph, _ = llama(layers=1)
    first, second = (run_pipeline(graph, default(), BuildOptions()).graph for _ in range(2))
    values = [[n.meta["val"] for n in model.graph.nodes if n.op == "call_function"] for model in (first, second)]
    assert len(values[0]) > 10 and all(a is b for a, b in zip(*values, strict=True))


def test_other_shapes_strides_dtypes_and_types_of_constants_do_not() -> None:
    calls = Calls()
    x = calls.input(3, 4)
    assert tuple(calls.value(aten.neg.default, calls.input(4, 3)).shape) == (4, 3)
    assert calls.value(aten.neg.default, calls.input(3, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16
    turned = calls.graph.call_function(aten.t.default, (calls.input(4, 3),))
    turned.meta["val"] = calls.values.of(turned)
    assert calls.value(aten.neg.default, x).stride() == (4, 1)
    assert calls.value(aten.neg.default, turned).stride() == (1, 3)
    ids = calls.input(3, dtype=torch.int64)
    dtypes = [calls.value(aten.add.Tensor, ids, constant).dtype for constant in (1, 1.0, True)]
    assert dtypes == [torch.int64, torch.float32, torch.int64]


def test_each_call_whose_size_depends_on_data_has_a_size_of_its_own() -> None:
    calls = Calls()
    first, second = (calls.value(aten.nonzero.default, calls.input(8)).shape[0] for _ in range(2))
    assert first.node.expr != second.node.expr


def test_what_an_op_does_not_accept_is_named() -> None:
    calls = Calls()
    with pytest.raises(PassError, match=r"aten\.mm\.default does not accept \(float32\[3, 4\], float32\[3, 4\]\)"):
        calls.value(aten.mm.default, calls.input(3, 4), calls.input(3, 4))
