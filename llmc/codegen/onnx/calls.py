"""A graph's calls as nodes, each with the function that says in standard ops what it computes.

A node's domain and type are the op's name: llmc and rms_norm, aten and add.Tensor. Its function has an input for each
tensor argument, by the argument's name, and for each tensor in a list NAME the inputs NAME_0, NAME_1, …. Arguments that
are not tensors are the node's attributes, by name, as they were given: numbers with a point as double scalars, types
and None as text, and a list with tensors as texts, where a tensor is the name of its input. As a body's
constants and shapes follow from them, calls that differ in more than their tensors' data have overloads of one
function.
"""

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import onnx
import torch
from onnx import TensorProto, helper
from torch import fx
from torch._ops import OpOverload

from llmc.codegen.onnx.function_body import Body, NotInOnnx, Value
from llmc.codegen.onnx.function_table import FUNCTIONS, WITHOUT_FUNCTION, Function
from llmc.codegen.onnx.functions.aten_pointwise import pointwise
from llmc.codegen.onnx.functions.codes import FUNCTIONS as DECODED
from llmc.codegen.onnx.types import OPSET
from llmc.codegen.origin import unsupported
from llmc.errors import LoweringError
from llmc.graph.call_arguments import call_arguments
from llmc.graph.dtype_names import torch_name
from llmc.graph.pointwise import POINTWISE
from llmc.graph.render import op_name
from llmc.graph.source_line import source_line

# Arguments of aten ops about memory, which the session manages itself.
_OF_MEMORY = frozenset(
    {"layout", "device", "pin_memory", "memory_format", "non_blocking", "implicit", "padding_idx", "copy"}
    | {"scale_grad_by_freq", "sparse", "requires_grad", "cudnn_enable", "enable_gqa", "half_to_float", "sorted"}
)


class Calls:
    """Makes nodes, and keeps the functions that they need, each once."""

    def __init__(self) -> None:
        # By domain and type, by content: the overload's function.
        self._made: dict[tuple[str, str], dict[bytes, onnx.FunctionProto]] = {}

    @property
    def functions(self) -> list[onnx.FunctionProto]:
        """The functions that the model calls, in the order of their first call."""
        return [function for overloads in self._made.values() for function in overloads.values()]

    def node(self, node: fx.Node, inputs: Mapping[fx.Node, str], outputs: list[str]) -> onnx.NodeProto:
        """The call of a node. inputs: names of the values that it reads; outputs: names of its results, followed by
        those of the arguments that it writes. Raises LoweringError if standard ops cannot express it."""
        name = op_name(node.target) if isinstance(node.target, OpOverload) else f"python.{op_name(node.target)}"
        domain, _, kind = name.partition(".")
        tensors = dict(_tensors(node))
        attributes = [helper.make_attribute(name, *_attribute(value)) for name, value in _attributes(node, tensors)]
        content = _function(node, tensors, [attribute.name for attribute in attributes], len(outputs))
        content.domain, content.name = domain, kind
        overloads = self._made.setdefault((domain, kind), {})
        key = content.SerializeToString(deterministic=True)
        if key not in overloads:
            content.overload = "" if not overloads else str(len(overloads) + 1)
            overloads[key] = content
        proto = helper.make_node(
            kind,
            [inputs[tensor] for tensor in tensors.values()],
            outputs,
            name=node.name,
            domain=domain,
            overload=overloads[key].overload,
        )
        proto.attribute.extend(attributes)
        for name, text in (("source", source_line(node)), ("rewrite", node.meta.get("rewrite"))):
            if text:
                proto.metadata_props.add(key=name, value=str(text))
        return proto


def _named(node: fx.Node) -> dict[str, Any]:
    """Return all arguments by names that a function's inputs can have."""
    return {f"operand_{n}" if n.isdecimal() else n: value for n, value in call_arguments(node).items()}


def _tensors(node: fx.Node) -> Iterator[tuple[str, fx.Node]]:
    """The function's inputs, and what is given for each."""
    for name, value in _named(node).items():
        if isinstance(value, fx.Node):
            yield name, value
        elif isinstance(value, list | tuple):
            yield from ((f"{name}_{i}", element) for i, element in enumerate(value) if isinstance(element, fx.Node))


def _attributes(node: fx.Node, tensors: Mapping[str, fx.Node]) -> Iterator[tuple[str, Any]]:
    """The other arguments that were given, in the order of the schema."""
    arguments = _named(node)
    passed = {*list(arguments)[: len(node.args)], *node.kwargs}
    for name, value in arguments.items():
        if name not in passed or name in tensors or isinstance(value, torch.memory_format):
            continue
        if isinstance(value, list | tuple) and (not value or not all(isinstance(element, int) for element in value)):
            yield name, [f"{name}_{i}" if isinstance(e, fx.Node) else _text(e) for i, e in enumerate(value)]
        else:
            yield name, value


def _attribute(value: Any) -> tuple[Any, str | None, int | None]:
    """The value, documentation and type of an attribute, as make_attribute takes them."""
    if isinstance(value, bool | int):
        return int(value), None, None
    if isinstance(value, float):
        return helper.make_tensor("", TensorProto.DOUBLE, [], [value]), None, None
    if isinstance(value, list | tuple):
        is_text = not value or isinstance(value[0], str)
        return list(value), None, onnx.AttributeProto.STRINGS if is_text else onnx.AttributeProto.INTS
    return _text(value), None, None


def _text(value: Any) -> str:
    return torch_name(value) if isinstance(value, torch.dtype) else str(value)


def _function(node: fx.Node, tensors: Mapping[str, fx.Node], attributes: list[str], results: int) -> onnx.FunctionProto:
    body = Body()
    values = {name: Value(name, tensor.meta["val"], tensor.target in DECODED) for name, tensor in tensors.items()}
    try:
        outputs = _filled(body, node, values)
    except NotInOnnx as problem:
        raise _refused(node, str(problem)) from None
    if len(outputs) != results:
        raise unsupported(node, f"its function returns {len(outputs)} values of {results}", "report this")
    named: list[str] = []
    for name in outputs:
        # A result is neither an input nor another result.
        named.append(body("Identity", name) if name in values or name in named else name)
    opsets = [helper.make_opsetid("", OPSET)]
    return helper.make_function("", "", list(values), named, body.nodes, opsets, attributes)


def _filled(body: Body, node: fx.Node, values: Mapping[str, Value]) -> tuple[str, ...]:
    """Runs the function; the names of its results."""
    if node.target in POINTWISE:
        of_nodes = {tensor: values[name] for name, tensor in reversed(list(_tensors(node)))}
        return (pointwise(body, node, of_nodes),)
    if node.target in WITHOUT_FUNCTION:
        raise NotInOnnx(WITHOUT_FUNCTION[node.target])
    function = FUNCTIONS.get(node.target)
    if function is None:
        raise NotInOnnx("it has no function of standard ops")
    arguments = {name: _valued(name, value, values) for name, value in _named(node).items()}
    wanted = _wanted(function, arguments)
    ignored = {name: arguments[name] for name in arguments if name not in wanted and name not in _OF_MEMORY}
    for name, value in ignored.items():
        # The remaining information is in the function's result.
        if "result" not in wanted and value is not None and value != _default(node.target, name) and name != "dtype":
            raise NotInOnnx(f"{name}={_text(value)} has no counterpart")
    candidates = arguments | {"result": _result(node)}
    outputs = function(body, **{name: candidates[name] for name in wanted if name in candidates})
    return (outputs,) if isinstance(outputs, str) else tuple(outputs)


def _wanted(function: Function, arguments: Mapping[str, Any]) -> list[str]:
    """Arguments of a function apart from the body: the parameters that it names and, if it has `**`, all tensors."""
    parameters = list(inspect.signature(function).parameters.values())[1:]
    takes_tensors = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    tensors = [name for name, value in arguments.items() if isinstance(value, Value)]
    return [*(parameter.name for parameter in parameters), *(tensors if takes_tensors else ())]


def _valued(name: str, argument: Any, values: Mapping[str, Value]) -> Any:
    if isinstance(argument, fx.Node):
        return values[name]
    if isinstance(argument, list | tuple):
        return [values[f"{name}_{i}"] if isinstance(e, fx.Node) else e for i, e in enumerate(argument)]
    return argument


def _result(node: fx.Node) -> Value | list[Value]:
    value = node.meta["val"]
    return [Value("", element) for element in value] if isinstance(value, list | tuple) else Value("", value)


def _default(target: Any, name: str) -> Any:
    return next((a.default_value for a in target._schema.arguments if a.name == name and a.has_default_value()), None)


def _refused(node: fx.Node, reason: str) -> LoweringError:
    return unsupported(node, reason, "export an earlier stage, or build for a target that has a kernel: --target cpu")
