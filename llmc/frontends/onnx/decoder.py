"""An ONNX graph as a module that torch.export traces: each node is its operator's translation, called in order."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from llmc.errors import CaptureError, LlmcError
from llmc.frontends.onnx.call import Call, Known, Translated, Value
from llmc.frontends.onnx.constants import constant
from llmc.frontends.onnx.interface import Interface, Role
from llmc.frontends.onnx.model import OnnxFunction, OnnxGraph, OnnxModel, OnnxNode, Reference
from llmc.frontends.onnx.numbers import makes_numbers
from llmc.frontends.onnx.operators import OPERATORS, unknown_operator
from llmc.frontends.onnx.own_operators import called, own_operator
from llmc.frontends.onnx.tensors import DTYPES, OnnxTensor
from llmc.frontends.tracing.trace import EXAMPLE_TOKENS

# Maximum elements of one value without the tokens' axes; no real model has more.
_MOST_ELEMENTS = 1 << 40


class OnnxDecoder(nn.Module):
    """forward(input_ids, positions) -> logits, of one whole sequence with nothing in the cache.

    tensors: parameters and buffers by the names in `names`, of the graph's values. known: values that are few
    numbers. dtypes: the dtypes that the graph's own become. longest: length of the longest sequence, by which branches
    are chosen.
    """

    def __init__(
        self,
        model: OnnxModel,
        graph: OnnxGraph,
        interface: Interface,
        tensors: nn.Module,
        names: Mapping[str, str],
        known: Mapping[str, Known],
        dtypes: Mapping[torch.dtype, torch.dtype],
        longest: int | None,
    ) -> None:
        super().__init__()
        self.tensors = tensors
        self._model, self._graph, self._interface = model, graph, interface
        self._names, self._known, self._dtypes = dict(names), dict(known), dict(dtypes)
        self._longest = longest if any(node.op == "If" for node in graph.nodes) else None

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Run the graph. input_ids, positions: [1, T] int64. Returns [1, T, vocabulary]."""
        if input_ids.shape[1] != positions.shape[1]:  # Lets the trace know that both have the one T.
            raise CaptureError("the number of positions differs from the number of tokens", at=self._model.file)
        if self._longest is not None:
            torch._check(input_ids.shape[1] <= max(self._longest, EXAMPLE_TOKENS))
        values: dict[str, Value] = {**self._known}
        values |= {name: getattr(self.tensors, attribute) for name, attribute in self._names.items()}
        for input_ in self._graph.inputs:
            if input_.name not in values:
                values[input_.name] = self._input(input_.name, input_.type, input_ids, positions)
        run = _Run(self._model, positions, self._dtypes)
        run.nodes(self._graph.nodes, values, self._model.opsets)
        logits = values[self._interface.logits]
        if not isinstance(logits, Tensor):
            raise CaptureError("the logits are known numbers, which depend on no token", at=self._model.file)
        return logits.unsqueeze(0) if self._interface.has_no_batch else logits

    def _input(self, name: str, type: int, input_ids: Tensor, positions: Tensor) -> Value:
        role, stored = self._interface.roles[name], DTYPES.get(type, torch.int64)
        dtype = self._dtypes.get(stored, stored)
        if role in (Role.IDS, Role.POSITIONS):
            numbers = (input_ids if role is Role.IDS else positions).to(dtype)
            return numbers.squeeze(0) if self._interface.has_no_batch else numbers
        if role is Role.MASK:
            return torch.ones_like(input_ids, dtype=dtype)
        if role is Role.PAST:
            return torch.empty(self._interface.past[name], dtype=dtype)
        return np.zeros(1, np.bool_ if stored is torch.bool else np.int64)


@dataclass
class _Run:
    """One walk through the graph."""

    model: OnnxModel
    positions: Tensor
    dtypes: Mapping[torch.dtype, torch.dtype]

    def nodes(self, nodes: Sequence[OnnxNode], values: dict[str, Value], opsets: Mapping[str, int]) -> None:
        """Add to `values` what nodes make."""
        for node in nodes:
            if node.outputs and all(name in values for name in node.outputs if name):
                continue  # codes, whose numbers stand for them
            outputs = self._made(node, values, opsets)
            for name, value in zip(node.outputs, outputs, strict=False):
                if name and value is not None:
                    values[name] = value

    def _made(self, node: OnnxNode, values: dict[str, Value], opsets: Mapping[str, int]) -> tuple[Value | None, ...]:
        function = self.model.functions.get(node.function)
        call = Call(
            node,
            tuple(values.get(name) for name in node.inputs),  # codes have none
            opsets.get(node.domain, 1),
            self.positions,
            self.dtypes,
        )
        outputs: Translated
        try:
            if node.op == "If":
                outputs = self._branch(call, values, opsets)
            elif function is not None and (node.domain, node.op_type) not in OPERATORS:
                own = own_operator(node)
                outputs = self._function(function, call) if own is None else called(own, call, function.inputs)
            else:
                outputs = _translated(call)
        except LlmcError:
            raise
        except Exception as error:  # Operators of damaged files meet torch in every wrong way; all of it is translated.
            raise call.refused(f"it does not fit its inputs: {_told(error)}", "export the model again") from error
        results = outputs if isinstance(outputs, tuple) else (outputs,)
        for value in results:
            if isinstance(value, Tensor) and math.prod(n for n in value.shape if isinstance(n, int)) > _MOST_ELEMENTS:
                raise call.refused(f"it makes {list(value.shape)}, more than a model does", "export the model again")
        return results

    def _function(self, function: OnnxFunction, call: Call) -> tuple[Value | None, ...]:
        arguments = dict(zip(function.inputs, call.inputs, strict=False))
        inner: dict[str, Value] = {name: value for name, value in arguments.items() if value is not None}
        attributes = {**function.attributes, **call.node.attributes}
        nodes = [_with_attributes(node, attributes) for node in function.nodes]
        self.nodes(nodes, inner, function.opsets)
        return tuple(inner.get(name) for name in function.outputs)

    def _branch(self, call: Call, values: dict[str, Value], opsets: Mapping[str, int]) -> tuple[Value | None, ...]:
        condition = bool(call.known(0).reshape(-1)[0])
        graph = call.node.attributes.get("then_branch" if condition else "else_branch")
        if not isinstance(graph, OnnxGraph):
            raise call.refused("it has no branches", "export the model again")
        inner = {**values, **{name: constant(tensor) for name, tensor in graph.tensors.items()}}
        self.nodes(graph.nodes, inner, opsets)
        return tuple(inner[value.name] for value in graph.outputs)


def _translated(call: Call) -> Translated:
    node = call.node
    if node.op == "Constant":
        return _constant_of(call)
    translate = OPERATORS.get((node.domain, node.op_type))
    if translate is None:
        raise unknown_operator(node)
    return translate(replace(call, makes_numbers=makes_numbers(call)))


def _constant_of(call: Call) -> Value:
    attributes = call.node.attributes
    for name in ("value_int", "value_ints"):
        if name in attributes:
            return np.asarray(attributes[name], dtype=np.int64)
    for name in ("value_float", "value_floats"):
        if name in attributes:
            return np.asarray(attributes[name], dtype=np.float32)
    tensor = attributes.get("value")
    if not isinstance(tensor, OnnxTensor):
        raise call.refused("it is neither a tensor nor a number")
    return constant(tensor)


def _with_attributes(node: OnnxNode, given: Mapping[str, Any]) -> OnnxNode:
    """A function's node with the attributes of the call."""
    filled = {
        name: given.get(value.name) if isinstance(value, Reference) else value
        for name, value in node.attributes.items()
    }
    return replace(node, attributes={name: value for name, value in filled.items() if value is not None})


def _told(error: Exception) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:300]
