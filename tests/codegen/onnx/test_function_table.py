"""Every op is exported by a function of standard ops, or refused by its name."""

from __future__ import annotations

import operator

import pytest
import torch

from llmc.codegen.onnx.function_table import FUNCTIONS, WITHOUT_FUNCTION
from llmc.codegen.onnx.graph_model import graph_model
from llmc.codegen.onnx.weights import onnx_weights
from llmc.errors import LoweringError
from llmc.graph.op_record import RECORDS
from llmc.graph.pointwise import POINTWISE
from llmc.graph.stage import Stage
from llmc.graph.verify import all_fallback_ops, legal_ops
from tests.graph_builder import llama


def test_functions_and_reasons_are_of_ops_that_graphs_may_hold() -> None:
    in_graphs = {overload for overload, record in RECORDS.items() if record.stages}
    known = {target for target in FUNCTIONS if getattr(target, "namespace", None) == "llmc"}
    assert known | set(WITHOUT_FUNCTION) <= in_graphs
    assert not known & set(WITHOUT_FUNCTION)


def test_an_op_in_neither_table_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    norm = torch.ops.llmc.rms_norm.default
    monkeypatch.setattr("llmc.codegen.onnx.calls.FUNCTIONS", {op: f for op, f in FUNCTIONS.items() if op != norm})
    graph, _ = llama(layers=1)
    with pytest.raises(LoweringError, match=r"llmc.rms_norm.default.*: it has no function"):
        graph_model(graph, onnx_weights(graph))


@pytest.mark.parametrize("stage", [Stage.CANONICAL, Stage.SERVING, Stage.OPTIMIZED])
def test_so_has_every_op_of_aten_that_is_legal_after_capture(stage: Stage) -> None:
    legal = (legal_ops(stage) | all_fallback_ops()) - set(RECORDS) - {operator.getitem}
    assert {str(op) for op in legal - set(FUNCTIONS) - set(POINTWISE)} == set()
