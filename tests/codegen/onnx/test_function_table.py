"""Every op is exported by a function of standard ops, or it is said why not."""

from __future__ import annotations

import operator

import pytest

from llmc.codegen.onnx.function_table import FUNCTIONS, WITHOUT_FUNCTION
from llmc.graph.op_record import RECORDS
from llmc.graph.pointwise import POINTWISE
from llmc.graph.stage import Stage
from llmc.graph.verify import all_fallback_ops, legal_ops


def test_every_op_that_a_graph_may_hold_has_a_function_or_a_reason() -> None:
    in_graphs = {overload for overload, record in RECORDS.items() if record.stages}
    known = {target for target in FUNCTIONS if getattr(target, "namespace", None) == "llmc"}
    assert {str(each) for each in in_graphs - known - set(WITHOUT_FUNCTION)} == set()
    assert known | set(WITHOUT_FUNCTION) <= in_graphs
    assert not known & set(WITHOUT_FUNCTION)


@pytest.mark.parametrize("stage", [Stage.CANONICAL, Stage.SERVING, Stage.OPTIMIZED])
def test_so_has_every_op_of_aten_that_is_legal_after_capture(stage: Stage) -> None:
    legal = (legal_ops(stage) | all_fallback_ops()) - set(RECORDS) - {operator.getitem}
    assert {str(each) for each in legal - set(FUNCTIONS) - set(POINTWISE)} == set()
