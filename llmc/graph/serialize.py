"""A graph as JSON text and back: what the reference executor runs from.

The grammar is closed: ops are looked up among those that are legal in an optimized graph (graph/verify.py), arguments
are node references, numbers, strings, lists and the few torch values below. Nothing is evaluated.
"""

import json
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from llmc.errors import EngineFormatError, LoweringError
from llmc.files.typed_json import LEFT_OUT, from_json, to_json
from llmc.graph.dtype_names import NAMED_DTYPES
from llmc.graph.model_graph import ModelGraph
from llmc.graph.stage import Stage
from llmc.graph.verify import all_fallback_ops, legal_ops

GRAPH_VERSION = 1


@dataclass(frozen=True)
class WeightOf:
    """Which stored weight a placeholder stands for, and in which dtype (a safetensors name) the graph reads it.

    format, part: for a slot of codes, the name of its record in llmc/formats/code_format.py, and the argument of
    llmc::dequantize that the placeholder is; empty for others.
    """

    slot: str
    dtype: str
    format: str = field(default="", metadata=LEFT_OUT)
    part: str = field(default="", metadata=LEFT_OUT)


def serialize_graph(graph: ModelGraph, weights: Mapping[str, WeightOf] = MappingProxyType({}), memory: str = "") -> str:
    """The graph's text. weights: the stored weights of the placeholders that are not stored as they are under their own
    names. memory: the facts about memory that the graph takes for granted (llmc/program/program_interface.py).

    Raises LoweringError for an op or argument outside the grammar, naming the node.
    """
    lines = [json.dumps(_legal_record(node), ensure_ascii=False) for node in graph.graph.nodes]
    body = ",\n".join(f"  {line}" for line in lines)
    table = f', "weights": {json.dumps(to_json(dict(weights)), ensure_ascii=False)}' if weights else ""
    memory_field = f', "memory": {json.dumps(memory.splitlines(), ensure_ascii=False)}' if memory else ""
    return f'{{"version": {GRAPH_VERSION}, "nodes": [\n{body}\n]{table}{memory_field}}}\n'


def deserialize_graph(text: str, at: Path) -> fx.Graph:
    """The graph of a text that `serialize_graph` wrote; nodes have no meta. llmc.ops must have been imported.

    Raises EngineFormatError.
    """
    try:
        content = json.loads(text)
        if content["version"] != GRAPH_VERSION:
            raise ValueError(f"version {content['version']}, this llmc reads {GRAPH_VERSION}")
        graph = fx.Graph()
        nodes: dict[str, fx.Node] = {}
        target = _legal_ops().__getitem__
        for record in content["nodes"]:
            add_node(graph, nodes, record, target, decode_argument)
        graph.lint()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, RuntimeError) as error:
        raise EngineFormatError(
            f"the graph cannot be read: {error!r:.200}", at=at, fix="rebuild the engine: llmc build MODEL -o ENGINE"
        ) from None
    return graph


def read_weight_table(text: str, at: Path) -> dict[str, WeightOf]:
    """The weights of a text that `deserialize_graph` has read. Raises EngineFormatError."""
    return from_json(dict[str, WeightOf], json.loads(text).get("weights", {}), str(at))


def read_memory_text(text: str) -> str:
    """The memory text of a graph that `deserialize_graph` can read."""
    return "".join(f"{line}\n" for line in json.loads(text).get("memory", ()))


def _legal_ops() -> dict[str, Callable[..., Any]]:
    """The allowed ops, by their names in the text."""
    return {_op_name(op): op for op in legal_ops(Stage.OPTIMIZED) | all_fallback_ops()}


def _op_name(op: Any) -> str:
    return "getitem" if op is operator.getitem else str(op)


def _legal_record(node: fx.Node) -> dict[str, Any]:
    if node.op == "call_function" and _op_name(node.target) not in _legal_ops():
        raise LoweringError(
            f"{node.target} cannot run in a reference engine",
            at=node.meta.get("stack_trace") or node.format_node(),
            fix="let the canonical passes rewrite it: see `llmc passes`",
        )
    return node_record(node, _op_name, encode_argument)


def node_record(
    node: fx.Node, target_name: Callable[[Any], str], encode: Callable[[Any, fx.Node], Any]
) -> dict[str, Any]:
    """A node as JSON. Raises LoweringError for one that neither calls a function nor is a placeholder or the output."""
    record: dict[str, Any] = {"name": node.name, "op": node.op}
    if node.op == "call_function":
        record["target"] = target_name(node.target)
    elif node.op not in ("placeholder", "output"):
        raise LoweringError(f"a {node.op} node cannot run in a reference engine", at=node.format_node())
    if node.op != "placeholder":
        record["args"] = [encode(argument, node) for argument in node.args]
    if node.kwargs:
        record["kwargs"] = {name: encode(argument, node) for name, argument in node.kwargs.items()}
    return record


def encode_argument(value: Any, node: fx.Node) -> Any:
    """An argument of a node as JSON; lists and tuples are both lists. Raises LoweringError outside the grammar."""
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        return [encode_argument(item, node) for item in value]
    for kind, names in _NAMED.items():
        for name, known in names.items():
            if value is known or value == known:
                return {kind: name}
    if isinstance(value, torch.device):
        return {"device": value.type}
    raise LoweringError(
        f"the argument {value!r} ({type(value).__name__}) of {node.name} cannot be written to a reference engine",
        at=node.meta.get("stack_trace") or node.format_node(),
    )


_NAMED: Mapping[str, Mapping[str, Any]] = {
    "dtype": NAMED_DTYPES,
    "memory_format": {"contiguous": torch.contiguous_format, "preserve": torch.preserve_format},
    "layout": {"strided": torch.strided},
}


def add_node(
    graph: fx.Graph,
    nodes: dict[str, fx.Node],
    record: dict[str, Any],
    target: Callable[[str], Callable[..., Any]],
    decode: Callable[[Any, dict[str, fx.Node]], Any],
) -> fx.Node:
    """The node that `node_record` wrote. nodes: those before, by name; it becomes one. KeyError, ValueError for any
    other record."""
    name, kind = record["name"], record["op"]
    if not isinstance(name, str) or not name.isidentifier() or name in nodes:
        raise ValueError(f"node name {name!r}")
    args = tuple(decode(argument, nodes) for argument in record.get("args", ()))
    kwargs = {key: decode(argument, nodes) for key, argument in record.get("kwargs", {}).items()}
    if kind == "placeholder":
        node = graph.placeholder(name)
    elif kind == "output":
        node = graph.output(*args)
    elif kind == "call_function":
        node = graph.create_node("call_function", target(record["target"]), args, kwargs, name)
    else:
        raise ValueError(f"a {kind!r} node")
    if node.name != name:
        raise ValueError(f"node name {name!r} is not usable")
    nodes[name] = node
    return node


def decode_argument(value: Any, nodes: dict[str, fx.Node]) -> Any:
    """The argument that `encode_argument` wrote. nodes: those before, by name. KeyError, ValueError for any other."""
    if isinstance(value, list):
        return [decode_argument(item, nodes) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, name),) = value.items()
    if kind == "node":
        return nodes[name]
    if kind == "float":
        return {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}[name]
    if kind == "device":
        return torch.device({"cpu": "cpu"}[name])
    return _NAMED[kind][name]
