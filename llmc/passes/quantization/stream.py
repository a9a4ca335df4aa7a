"""Run a graph over calibration sequences one node at a time, so that memory holds one layer of it.

Every sequence passes a node before the next node runs, weights are read when a node needs them and dropped after, and
values are dropped after their last reader. Between nodes the graph may be rewritten: what was inserted is computed on
the way. So a weight can be quantized with what its input is after all weights before it were. And the sequences may
branch: from there on they are also run with another weight, beside those that are not.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from llmc.graph.model_graph import ModelGraph
from llmc.graph.product_parts import is_product
from llmc.graph.weights import WeightSource, evaluate
from llmc.passes.uses import weight_value


@dataclass(frozen=True)
class _Replaced:
    branch: int
    weight: fx.Node
    value: Tensor


class Stream:
    """Values of a canonical graph's nodes, while they are needed. sequences: token ids, [length] each."""

    def __init__(self, graph: ModelGraph, source: WeightSource, sequences: Sequence[Tensor]) -> None:
        self._graph, self._source = graph, source
        self._count = self._sequences = len(sequences)
        self._values: dict[fx.Node, list[Any]] = {}
        self._done: set[fx.Node] = set()
        self._constant: dict[fx.Node, bool] = {}
        self._replaced: _Replaced | None = None
        for node in graph.inputs():
            self._values[node] = [ids if node.name == "input_ids" else torch.arange(len(ids)) for ids in sequences]

    def stops(self, at: Collection[fx.Node]) -> Iterator[fx.Node]:
        """Yield each of these nodes before it runs, in order; ends with the last of them, which is not run."""
        left = set(at)
        for node in list(self._graph.graph.nodes):
            if not left:
                return
            if node in left:
                self._replaced = None
                left.remove(node)
                yield node
            if node.op == "call_function" and left:
                self._run(node)

    def rows(self, node: fx.Node, limit: int | None = None) -> Tensor:
        """A value of every sequence, joined along the tokens; limit: that many rows, spread evenly. Not of branches."""
        joined = torch.cat([value.reshape(-1, value.shape[-1]) for value in self.parts(node)])
        if limit is None or len(joined) <= limit:
            return joined
        return joined[torch.linspace(0, len(joined) - 1, limit).long()]

    def parts(self, node: fx.Node) -> Iterator[Tensor]:
        """A value of each sequence in turn. Not of branches."""
        yield from self._value(node)[: self._sequences]

    def weight(self, node: fx.Node) -> Tensor:
        """The data of a weight placeholder, read now."""
        return evaluate(self._graph.weights[node.name], self._source)

    def branch(self) -> int:
        """A number for one more run of all sequences, which shares with the plain one what was computed so far."""
        for values in self._values.values():
            values.extend(values[: self._sequences])
        self._count += self._sequences
        return self._count // self._sequences - 1

    def replace_weight(self, branch: int, weight: fx.Node, value: Tensor) -> None:
        """What a branch reads for a weight placeholder, until the next stop."""
        self._replaced = _Replaced(branch, weight, value)

    @torch.inference_mode()
    def outputs(self) -> Iterator[Tensor]:
        """What the graph returns for each sequence, then for those of each branch; computed one by one from here on."""
        result = self._graph.logits()
        constants: dict[fx.Node, Any] = {}
        for index in range(self._count):
            yield self._evaluated(result, index, {}, constants)

    def _evaluated(self, node: fx.Node, index: int, known: dict[fx.Node, Any], constants: dict[fx.Node, Any]) -> Any:
        if node in self._values:
            return self._values[node][index]
        if self._is_constant(node):
            if node not in constants:
                constants[node] = self._constant_value(node)
            return constants[node]
        if node not in known:
            inputs = {n: self._evaluated(n, index, known, constants) for n in node.all_input_nodes}
            known[node] = self._call(node, inputs, index)
        return known[node]

    def _value(self, node: fx.Node) -> list[Any]:
        if node not in self._values:
            self._run(node)
        return self._values[node]

    @torch.inference_mode()
    def _run(self, node: fx.Node) -> None:
        if node in self._values or self._is_constant(node):
            return
        shared = {n: self._constant_value(n) for n in node.all_input_nodes if self._is_constant(n)}
        if is_product(node):
            # They multiply in fp32: convert the weight once, not for each sequence.
            shared = {n: value.float() for n, value in shared.items()}
        inputs = {n: self._value(n) for n in node.all_input_nodes if n not in shared}
        self._values[node] = [
            self._call(node, shared | {n: value[index] for n, value in inputs.items()}, index)
            for index in range(self._count)
        ]
        self._done.add(node)
        for each in inputs:
            if all(user in self._done or user.op == "output" for user in each.users):
                self._values.pop(each, None)

    def _call(self, node: fx.Node, inputs: dict[fx.Node, Any], index: int) -> Any:
        """node's value for one sequence of one branch."""
        replaced = self._replaced
        if replaced is not None and replaced.branch == index // self._sequences and replaced.weight in inputs:
            inputs = inputs | {replaced.weight: replaced.value}
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), inputs.__getitem__)
        assert callable(node.target)
        return node.target(*args, **kwargs)

    def _is_constant(self, node: fx.Node) -> bool:
        """Whether a value is made of weights alone."""
        known = self._constant.get(node)
        if known is None:
            if node.op == "placeholder":
                known = node.name in self._graph.weights
            else:
                known = node.op == "call_function" and all(map(self._is_constant, node.all_input_nodes))
            self._constant[node] = known
        return known

    def _constant_value(self, node: fx.Node) -> Any:
        return weight_value(node, self._graph, self._source)
