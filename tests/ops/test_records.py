"""Each op's record is complete, and every op that a lowered graph may hold has a kernel or a stated reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode

from llmc.codegen.backend import WITHOUT_KERNEL, no_kernel
from llmc.codegen.cpp import kernel_table as cpp
from llmc.codegen.triton import kernel_table as triton
from llmc.graph.call_arguments import put_in_order
from llmc.graph.op_record import RECORDS, OpRecord, op_call
from llmc.graph.stage import Stage
from llmc.ops.registry import WHEN_OPTIMIZED, like, op, per_element
from llmc.ops.sampling import EVERY_TOKEN

ALL = list(RECORDS.values())


@pytest.mark.parametrize(("kind", "kernels"), [("cpp", cpp.KERNELS), ("triton", triton.KERNELS)])
def test_an_op_has_a_kernel_or_a_stated_reason(kind: str, kernels: dict[Any, Any]) -> None:
    lowered = {op for op, record in RECORDS.items() if Stage.OPTIMIZED in record.stages and record.part is None}
    assert {str(missing) for missing in lowered - set(kernels) - set(WITHOUT_KERNEL[kind])} == set()
    assert not set(kernels) & set(WITHOUT_KERNEL[kind])
    assert set(kernels) <= set(RECORDS)


def test_the_reason_is_told() -> None:
    graph = fx.Graph()
    node = graph.call_function(torch.ops.llmc.dequantize.default, ())
    assert "multiply_unrounded has left it unchanged" in no_kernel(node, "cpu", "cpp").reason


@pytest.mark.parametrize("record", ALL, ids=lambda record: record.name)
def test_a_record_names_arguments_that_the_op_has(record: OpRecord) -> None:
    names = {argument.name for argument in record.overload._schema.arguments}
    assert {*record.rows, *record.takes, *([record.table] if record.table else [])} <= names
    assert record.reference.__doc__


@pytest.mark.parametrize("record", [record for record in ALL if record.takes], ids=lambda record: record.name)
def test_products_and_lookups_call_their_arguments_as_kernels_and_passes_do(record: OpRecord) -> None:
    assert record.is_product != record.is_lookup
    assert {"x", "weight", "bias"} <= set(record.arguments) if record.is_product else "weight" in record.arguments
    assert ("delta" in record.arguments) == ("adapters" in record.arguments)
    assert ({"index", "experts"} <= set(record.arguments)) == record.is_of_experts


@pytest.mark.parametrize("missing", ["fake", "stages", "flops"])
def test_what_is_left_out_is_named(missing: str) -> None:
    given = {"fake": like("x"), "stages": WHEN_OPTIMIZED, "flops": per_element(1)}
    declare: Any = op
    with pytest.raises(TypeError, match=missing):
        declare(**{name: value for name, value in given.items() if name != missing})


def test_keywords_are_put_in_order() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(torch.ops.llmc.rms_norm.default, (x,), {"eps": 1e-5, "weight": None})
    put_in_order(node)
    assert (node.args, node.kwargs) == ((x, None, 1e-5), {})
    with FakeTensorMode():
        x.meta["val"] = torch.empty(3, 8)
    node.meta["val"] = x.meta["val"]
    call = op_call(node)
    assert call.shape("x") == [3, 8] and call.shape("weight") == [] and call.arguments["eps"] == 1e-5
    record = RECORDS[torch.ops.llmc.rms_norm.default]
    assert record.flops(call) == 4 * 3 * 8 and record.check is not None and record.check(call) is None


def test_aten_keywords_stay() -> None:
    graph = fx.Graph()
    node = graph.call_function(torch.ops.aten.sum.dim_IntList, (graph.placeholder("x"), [1]), {"keepdim": True})
    put_in_order(node)
    assert node.kwargs == {"keepdim": True}


def test_the_schema_is_the_signatures() -> None:
    assert str(torch.ops.llmc.kv_write.default._schema) == (
        "llmc::kv_write(Tensor k, Tensor v, Tensor(a2!) k_cache, Tensor(a3!) v_cache, Tensor slot_mapping, "
        "str? cache_format=None) -> ()"
    )
    empty: Tensor = torch.ops.llmc.top_k_rows.default(torch.zeros(2, 5), 3)[0]
    assert empty.shape == (2, 3) and EVERY_TOKEN > 5
