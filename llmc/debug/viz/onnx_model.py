"""A graph as an ONNX model for viewers such as Netron: every op a custom op of the domain `llmc` or `aten`.

It has no weights' data and is not for running: weights are inputs. A node carries the line of the model's source and
the rewrite that made it, as metadata and as its doc string.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from llmc.codegen.onnx.installed import require_onnx
from llmc.debug.viz.stage_graph import NodeOrigin, StageGraph
from llmc.graph.graph_text import NodeText

if TYPE_CHECKING:
    import onnx

# With IR version 10, of ONNX 1.16, nodes have metadata.
_IR_VERSION = 10
_TENSOR = re.compile(r"(\w+)\[([^\]]*)\]")
_NUMBER = re.compile(r"-?\d+")
_REAL = re.compile(r"-?(?:\d+\.?\d*(?:e[+-]?\d+)?|inf)")
_TYPES = {
    "bool": "BOOL",
    "int8": "INT8",
    "uint8": "UINT8",
    "int16": "INT16",
    "int32": "INT32",
    "int64": "INT64",
    "float16": "FLOAT16",
    "bfloat16": "BFLOAT16",
    "float32": "FLOAT",
    "float64": "DOUBLE",
}


def onnx_model(stage: StageGraph) -> onnx.ModelProto:
    """The model, which onnx.checker accepts. Raises LlmcError without the package onnx."""
    require_onnx("--format onnx")
    from onnx import checker, helper

    values = _Values(stage)
    calls = [node for node in stage.graph.nodes if node.op is not None and not values.is_alias(node)]
    inputs = [info for node in stage.graph.nodes if node.op is None for info in values.infos(node)]
    returned = [values.infos(node)[0] for node in stage.graph.nodes if node.name in stage.graph.returns]
    names = {info.name for info in returned}
    graph = helper.make_graph(
        [_node(node, values, stage.origins) for node in calls],
        re.sub(r"\W+", "_", stage.title),
        inputs,
        returned,
        value_info=[info for node in calls for info in values.infos(node) if info.name not in names],
    )
    domains = {"": 21} | {str(node.op).partition(".")[0]: 1 for node in stage.graph.nodes if node.op is not None}
    model = helper.make_model(
        graph,
        producer_name="llmc",
        ir_version=_IR_VERSION,
        opset_imports=[helper.make_opsetid(domain, version) for domain, version in domains.items()],
        doc_string=stage.title,
    )
    checker.check_model(model)
    return model


class _Values:
    """The tensors of a graph by their names in ONNX, where each result of a node has one of its own."""

    def __init__(self, stage: StageGraph) -> None:
        self._nodes = {node.name: node for node in stage.graph.nodes}

    def is_alias(self, node: NodeText) -> bool:
        """Whether the node only picks one of several results."""
        return node.op == "getitem"

    def outputs(self, node: NodeText) -> list[str]:
        count = len(_types(node.type))
        return [node.name] if count == 1 else [f"{node.name}.{i}" for i in range(count)]

    def name(self, node: str) -> str:
        """What a reference to the node means."""
        found = self._nodes[node]
        if not self.is_alias(found):
            return self.outputs(found)[0] if self.outputs(found) else ""
        index = int(found.arguments.rpartition(",")[2])
        return self.outputs(self._nodes[found.inputs[0]])[index]

    def infos(self, node: NodeText) -> list[onnx.ValueInfoProto]:
        from onnx import TensorProto, helper

        names = [self.name(node.name)] if self.is_alias(node) else self.outputs(node)
        pairs = zip(names, _types(node.type), strict=True)
        return [helper.make_tensor_value_info(n, getattr(TensorProto, kind), shape) for n, (kind, shape) in pairs]


def _types(text: str) -> list[tuple[str, list[int | str]]]:
    """ONNX types and shapes of what a node returns; a plain size is a scalar; none for ()."""
    if text == "()":
        return []
    found = _TENSOR.findall(text)
    if not found:
        return [("INT64", [])]
    return [
        (_TYPES.get(dtype, "UNDEFINED"), [int(s) if _NUMBER.fullmatch(s) else s for s in shape.split(", ") if s])
        for dtype, shape in found
    ]


def _node(node: NodeText, values: _Values, origins: Mapping[str, NodeOrigin]) -> onnx.NodeProto:
    from onnx import helper

    domain, _, op = str(node.op).partition(".")
    inputs, attributes = [], dict[str, Any]()
    for name, text in _arguments(node):
        references = re.findall(r"%(\w+)", text)
        if references:
            inputs += [values.name(reference) for reference in references]
        elif text != "None":
            attributes[name] = _attribute(text)
    origin = origins.get(node.name, NodeOrigin())
    made = helper.make_node(
        op, inputs, values.outputs(node), name=node.name, domain=domain, doc_string=origin.source, **attributes
    )
    for key, value in (("source", origin.source), ("rewrite", origin.rewrite)):
        if value is not None:
            made.metadata_props.add(key=key, value=value)
    return made


def _arguments(node: NodeText) -> Iterator[tuple[str, str]]:
    """(name, text) of each argument, positional ones named after the op's schema where torch knows it."""
    names = _schema_names(str(node.op))
    for i, text in enumerate(_split(node.arguments)):
        name, equals, value = text.partition("=")
        if equals and name.isidentifier():
            yield name, value
        else:
            yield names[i] if i < len(names) else f"argument{i}", text


def _schema_names(op: str) -> list[str]:
    import torch

    import llmc.ops  # noqa: F401  (registers the ops)

    namespace, _, name = op.partition(".")
    packet_name, _, overload = name.partition(".")
    if namespace not in ("aten", "llmc"):
        return []
    packet = getattr(getattr(torch.ops, namespace), packet_name, None)
    found = getattr(packet, overload or "default", None)
    return [] if found is None else [argument.name for argument in found._schema.arguments]


def _split(text: str) -> list[str]:
    """At commas outside of brackets and quotes."""
    parts, depth, quote, start = [], 0, "", 0
    for i, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    last = text[start:].strip()
    return [*parts, last] if last else parts


def _attribute(text: str) -> Any:
    """A number, a list of numbers of one kind, or else the text."""
    if text in ("True", "False"):
        return int(text == "True")
    if _NUMBER.fullmatch(text):
        return int(text)
    if _REAL.fullmatch(text):
        return float(text)
    if text.startswith("[") and text.endswith("]"):
        items = [_attribute(item) for item in _split(text[1:-1])]
        if items and all(isinstance(item, int) for item in items):
            return items
        if items and all(isinstance(item, int | float) for item in items):
            return [float(item) for item in items]
        return text
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text
