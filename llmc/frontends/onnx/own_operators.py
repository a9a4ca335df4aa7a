"""Functions of the domains `llmc` and `aten`, as `llmc export` writes them: calls of a graph's own ops.

A function's inputs are called after the op's arguments (`tensors_0` for one of a list), a node's attributes are the
arguments that are not tensors: numbers, names of dtypes, `None`, and in lists the names of inputs.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import SymInt
from torch._ops import OpOverload

from llmc.frontends.onnx.call import Call, Translated
from llmc.frontends.onnx.constants import constant
from llmc.frontends.onnx.model import OnnxNode
from llmc.frontends.onnx.numbers import array
from llmc.frontends.onnx.tensors import OnnxTensor
from llmc.graph.dtype_names import NAMED_DTYPES
from llmc.graph.stage import Stage
from llmc.graph.verify import legal_ops

_aten = torch.ops.aten
# Ops that captured graphs may contain in addition to those of canonical graphs. An explicit list, because aten has ops
# that open files.
_CAPTURED = frozenset(
    {
        _aten._to_copy.default,
        _aten.embedding.default,
        _aten.layer_norm.default,
        _aten.linear.default,
        _aten.matmul.default,
        _aten.mean.dim,
        _aten.rms_norm.default,
        _aten.softmax.int,
        _aten.sym_size.int,
        _aten.view.default,
    }
)


def own_operator(node: OnnxNode) -> OpOverload | None:
    """The op that a function of llmc's export stands for; None for any other function."""
    if node.domain not in ("llmc", "aten"):
        return None
    name, _, overload = node.op_type.partition(".")
    packet = getattr(getattr(torch.ops, node.domain), name, None)
    op = getattr(packet, overload or "default", None)
    if op is _aten.clone.default:
        return _aten.contiguous.default  # For which it stands where it does something: a view of it follows.
    return op if op in _CAPTURED | legal_ops(Stage.CANONICAL) else None


def called(op: OpOverload, call: Call, inputs: Sequence[str]) -> Translated:
    """Call an op with the inputs of a function. inputs: the names of the function's inputs."""
    tensors = {argument.name for argument in op._schema.arguments if "Tensor" in str(argument.type)}
    by_name = {
        # One of a list is called after it.
        name: call.tensor(index) if {name, name.rpartition("_")[0]} & tensors else _number(call, index)
        for index, name in enumerate(inputs)
    }
    keywords: dict[str, Any] = {}
    for argument in op._schema.arguments:
        if argument.name in by_name:
            keywords[argument.name] = by_name[argument.name]
        elif argument.name in call.node.attributes:
            keywords[argument.name] = _argument(call.node.attributes[argument.name], argument.type, by_name)
    result: Any = op(**keywords)
    if isinstance(result, SymInt | int):
        return array(result)
    return tuple(result) if isinstance(result, tuple | list) else result


def _number(call: Call, index: int) -> Any:
    value = call.value(index)
    return value if isinstance(value, torch.Tensor) else value.reshape(-1)[0]


def _argument(value: Any, kind: Any, given: dict[str, Any]) -> Any:
    if isinstance(value, tuple):
        return [_argument(element, None, given) for element in value]
    if isinstance(value, OnnxTensor):
        return constant(value).item()
    if not isinstance(value, str):
        return bool(value) if str(kind) in ("bool", "Optional[bool]") else value
    if value in given:
        return given[value]
    if value == "None":
        return None
    if str(kind) in ("str", "Optional[str]"):
        return value
    return NAMED_DTYPES[value] if value in NAMED_DTYPES else int(value)
