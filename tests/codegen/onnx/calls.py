"""One call of an op in onnxruntime, by its function of standard ops, beside the op itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode

import llmc.ops  # noqa: F401 (registers the ops)
from llmc.codegen.dependencies import written_arguments
from llmc.codegen.onnx.calls import Calls
from llmc.codegen.onnx.types import IR_VERSION, OPSET, value_info

ops = torch.ops.llmc
aten = torch.ops.aten


def in_onnxruntime(op: Any, *arguments: Any, **named: Any) -> list[np.ndarray[Any, Any]]:
    """What a call's function computes: its results, then the arguments that it writes."""
    graph, mode, feeds = fx.Graph(), FakeTensorMode(), dict[str, Tensor]()

    def given(value: Any) -> Any:
        if isinstance(value, list):
            return [given(element) for element in value]
        if not isinstance(value, Tensor):
            return value
        node = graph.placeholder(f"x{len(feeds)}")
        node.meta["val"] = mode.from_tensor(value)
        feeds[node.name] = value
        return node

    node = graph.call_function(op, tuple(map(given, arguments)), {name: given(v) for name, v in named.items()})
    node.meta["val"] = _fake(op, mode, node)
    results = node.meta["val"] if isinstance(node.meta["val"], list | tuple) else [node.meta["val"]]
    results = [*results, *(argument.meta["val"] for argument in written_arguments(node))]
    outputs = [f"y{i}" for i in range(len(results))]
    calls = Calls()
    made = calls.node(node, {operand: operand.name for operand in node.all_input_nodes}, outputs)
    inputs = [
        value_info(placeholder.name, placeholder.meta["val"], {}) for placeholder in graph.find_nodes(op="placeholder")
    ]
    body = helper.make_graph(
        [made], "call", inputs, [value_info(n, v, {}) for n, v in zip(outputs, results, strict=True)]
    )
    opsets = [helper.make_opsetid(domain, version) for domain, version in (("", OPSET), (made.domain, 1))]
    model = helper.make_model(body, functions=calls.functions, opset_imports=opsets, ir_version=IR_VERSION)
    onnx.checker.check_model(model)
    import onnxruntime

    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    values: list[np.ndarray[Any, Any]] = session.run(None, {name: value.numpy() for name, value in feeds.items()})
    return values


def _fake(op: Any, mode: FakeTensorMode, node: fx.Node) -> Any:
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
    with mode:
        return op(*args, **kwargs)


def check(op: Any, *arguments: Any, **named: Any) -> None:
    """The function's results are the op's, and so is what both write."""
    actual = in_onnxruntime(op, *arguments, **named)
    changed = [argument.alias_info is not None and argument.alias_info.is_write for argument in op._schema.arguments]
    arguments = tuple(given.clone() if is_it else given for given, is_it in zip(arguments, changed, strict=False))
    made = op(*arguments, **named)
    wanted = [*(made if isinstance(made, list | tuple) else [made])]
    wanted += [given for given, is_it in zip(arguments, changed, strict=False) if is_it]
    for result, ours in zip(actual, wanted, strict=True):
        torch.testing.assert_close(torch.from_numpy(result), ours, rtol=1e-5, atol=1e-5, equal_nan=True)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
