"""A graph at any stage as an ONNX model that runs: inputs, calls with their functions, weights outside.

Memory that an op writes becomes a value: a cache is an input of the model, and what it is in the end an output.
"""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
from onnx import TensorProto, helper
from torch import fx

from llmc.codegen.dependencies import written_arguments
from llmc.codegen.onnx.calls import Calls
from llmc.codegen.onnx.function_table import NOTHING
from llmc.codegen.onnx.types import IR_VERSION, OPSET, value_info
from llmc.codegen.onnx.weights import OnnxWeight
from llmc.errors import LoweringError
from llmc.graph.model_graph import ModelGraph
from llmc.graph.step_inputs import symbol_names
from llmc.graph.weights import stored_names
from llmc.program import LOGITS, WRITTEN


@dataclass(frozen=True)
class Place:
    """The place of a weight's bytes: in a file next to the model, by a relative path."""

    file: str
    offset: int
    nbytes: int


def graph_model(graph: ModelGraph, weights: Sequence[OnnxWeight]) -> onnx.ModelProto:
    """The model of a graph of one rank, whose weights, those of its placeholders, have no place yet.

    Outputs: `logits`, the side outputs by their names, and each cache as NAME_written. Raises LoweringError.
    """
    if graph.ranks > 1:
        raise LoweringError(
            f"the graph runs on {graph.ranks} ranks, and an ONNX model on one",
            at=graph.info.name,
            fix="leave out tensor_parallel_size",
        )
    return _Writer(graph).model(weights)


def place_weights(model: onnx.ModelProto, places: Mapping[str, Place]) -> None:
    """Set the files and offsets of a model's weights, by name, replacing earlier ones."""
    for tensor in model.graph.initializer:
        place = places[tensor.name]
        del tensor.external_data[:]
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", place.file), ("offset", place.offset), ("length", place.nbytes)):
            tensor.external_data.add(key=key, value=str(value))


class _Writer:
    """One model while its nodes are put together."""

    def __init__(self, graph: ModelGraph) -> None:
        self._graph = graph
        self._calls = Calls()
        self._sizes: dict[Any, str] = dict(symbol_names(graph.graph))
        self._nodes: list[onnx.NodeProto] = []
        self._infos: dict[str, onnx.ValueInfoProto] = {}
        # The current name of each node's value; a cache's name changes when it is written.
        self._names: dict[fx.Node, str] = {node: node.name for node in graph.graph.find_nodes(op="placeholder")}

    def model(self, weights: Sequence[OnnxWeight]) -> onnx.ModelProto:
        """Return the complete model."""
        graph = self._graph
        for node in graph.graph.nodes:
            if node.op == "call_function" and node.target not in NOTHING:
                self._add(node)
        outputs = self._outputs()
        inputs = [value_info(node.name, node.meta["val"], self._sizes) for node in graph.inputs()]
        graph_proto = helper.make_graph(
            self._nodes,
            graph.stage.value,
            inputs,
            outputs,
            [_initializer(graph, weight) for weight in weights],
            value_info=[info for name, info in self._infos.items() if name not in {o.name for o in outputs}],
        )
        functions = self._calls.functions
        domains = {"": OPSET} | {function.domain: 1 for function in functions}
        return helper.make_model(
            graph_proto,
            producer_name="llmc",
            ir_version=IR_VERSION,
            functions=functions,
            opset_imports=[helper.make_opsetid(domain, version) for domain, version in domains.items()],
            doc_string=f"{graph.info.name}, {graph.stage.value}",
        )

    def _add(self, node: fx.Node) -> None:
        """The node's call, or another name for one of several results."""
        if node.target is operator.getitem:
            source, index = node.args
            self._names[node] = f"{self._names[source]}.{index}"  # type: ignore[index]
            return
        value = node.meta["val"]
        several = isinstance(value, list | tuple)
        results = [] if value is None else [f"{node.name}.{i}" for i in range(len(value))] if several else [node.name]
        for name, result in zip(results, value if several else [value], strict=False):
            self._infos[name] = value_info(name, result, self._sizes)
        changed = written_arguments(node)
        outputs = [*results, *(f"{written.name}{WRITTEN}" for written in changed)]
        self._nodes.append(self._calls.node(node, self._names, outputs))
        self._names[node] = node.name
        for cache in changed:
            self._names[cache] = f"{cache.name}{WRITTEN}"
            self._infos[self._names[cache]] = value_info(self._names[cache], cache.meta["val"], self._sizes)

    def _outputs(self) -> list[onnx.ValueInfoProto]:
        """The graph's results under their public names, and the caches."""
        graph = self._graph
        infos = []
        for name, node in zip((LOGITS, *graph.side_outputs), graph.returned(), strict=True):
            self._nodes.append(helper.make_node("Identity", [self._names[node]], [name], name=f"return_{name}"))
            infos.append(value_info(name, node.meta["val"], self._sizes))
        caches = [node for node in graph.inputs() if self._names[node] != node.name]
        return infos + [self._infos[self._names[node]] for node in caches]


def _initializer(graph: ModelGraph, weight: OnnxWeight) -> onnx.TensorProto:
    """A weight without its bytes."""
    return onnx.TensorProto(
        name=weight.slot.name,
        data_type=weight.element,
        dims=weight.slot.shape,
        doc_string=", ".join(stored_names(graph.weights[weight.slot.name])),
    )
