"""Run a graph over calibration sequences a few nodes at a time, so that memory holds one layer of it.

The nodes up to and including the next product make a run: every sequence passes it before the next run begins, several
sequences at a time on their own threads. Weights are read when a run needs them and dropped after, and values are
dropped after their last reader. Between runs the graph may be rewritten; inserted nodes are computed on the way. A
weight can therefore be quantized with the inputs that result from the quantized weights before it. Sequences may also
branch: from there on they are run both with a changed weight and without.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from llmc.graph.model_graph import ModelGraph
from llmc.graph.product_parts import is_product
from llmc.graph.weights import WeightSource, evaluate
from llmc.passes.parallel_map import one_thread, parallel_map
from llmc.passes.uses import weight_value


@dataclass(frozen=True)
class _Replaced:
    branch: int
    weight: fx.Node
    value: Tensor


@dataclass(frozen=True)
class _Run:
    """A run of nodes between two weights. nodes: in order. constants: by node, those of its inputs that are made of
    weights alone."""

    nodes: Sequence[fx.Node]
    constants: Mapping[fx.Node, Mapping[fx.Node, Any]]


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
        left, run = set(at), list[fx.Node]()
        for node in list(self._graph.graph.nodes):
            if not left:
                return
            if node in left:
                self._compute(run)
                run.clear()
                self._replaced = None
                left.remove(node)
                yield node
            if node.op == "call_function":
                run.append(node)
            if is_product(node) and left:
                self._compute(run)
                run.clear()

    def rows(self, node: fx.Node, limit: int | None = None) -> Tensor:
        """A value of every sequence, joined along the tokens; limit: that many rows, spread evenly. Not of branches."""
        parts = [value.reshape(-1, value.shape[-1]) for value in self.parts(node)]
        count = sum(map(len, parts))
        with one_thread():
            if limit is None or count <= limit:
                return torch.cat(parts)
            chosen = torch.linspace(0, count - 1, limit).long()
            ends = torch.tensor([len(part) for part in parts]).cumsum(0)
            place = torch.searchsorted(ends, chosen, right=True)
            return torch.cat([p[chosen[place == i] - (int(ends[i]) - len(p))] for i, p in enumerate(parts)])

    def mean_squares(self, node: fx.Node) -> Tensor:
        """The mean squares of a value's channels over the tokens of all sequences: [channels], fp32. Branches are
        excluded."""
        parts = [value.reshape(-1, value.shape[-1]) for value in self.parts(node)]
        squares = parallel_map(lambda part: part.float().square().sum(0), parts)
        return torch.stack(squares).sum(0) / sum(map(len, parts))

    def parts(self, node: fx.Node) -> Iterator[Tensor]:
        """Yield a value for each sequence. Branches are excluded."""
        yield from self._value(node)[: self._sequences]

    def weight(self, node: fx.Node) -> Tensor:
        """The data of a weight placeholder, read now."""
        return evaluate(self._graph.weights[node.name], self._source)

    def branch(self) -> int:
        """The number of a new branch of all sequences, which shares the values computed until now with the main run."""
        for values in self._values.values():
            values.extend(values[: self._sequences])
        self._count += self._sequences
        return self._count // self._sequences - 1

    def replace_weight(self, branch: int, weight: fx.Node, value: Tensor) -> None:
        """Replace the value of a weight placeholder in a branch, until the next stop."""
        self._replaced = _Replaced(branch, weight, value)

    def thin(self, node: fx.Node, every: int) -> None:
        """Keep every `every`-th token of a value, in all sequences and branches: [tokens, channels] each."""
        self._values[node] = [value[::every] for value in self._value(node)]

    def outputs(self) -> Callable[[int], Tensor]:
        """A function that computes what the graph returns for a sequence, given its number, on any thread. Sequence i
        of branch b has the number b * sequences + i."""
        result = self._graph.logits()
        run = self._run_to([result])

        @torch.inference_mode()
        def output(index: int) -> Tensor:
            (tensor,) = self._computed(run, [result], index)
            assert isinstance(tensor, Tensor)
            return tensor

        return output

    def _value(self, node: fx.Node) -> list[Any]:
        if node not in self._values:
            self._compute([node], is_kept=True)
        return self._values[node]

    @torch.inference_mode()
    def _compute(self, wanted: Sequence[fx.Node], *, is_kept: bool = False) -> None:
        """Nodes of every sequence and branch. Their values stay while others are to read them, or if is_kept."""
        run = self._run_to(wanted)
        self._done.update(run.nodes)
        kept = [node for node in run.nodes if self._is_needed(node) or (is_kept and node in wanted)]
        computed = parallel_map(lambda index: self._computed(run, kept, index), range(self._count))
        self._values.update({node: [values[i] for values in computed] for i, node in enumerate(kept)})
        for operand in {n for node in run.nodes for n in node.all_input_nodes}:
            if not self._is_needed(operand):
                self._values.pop(operand, None)

    def _is_needed(self, node: fx.Node) -> bool:
        """Whether a node that is not computed yet reads it, or it is what the graph returns."""
        waiting = any(user not in self._done and user.op != "output" for user in node.users)
        return waiting or node is self._graph.logits()

    def _run_to(self, wanted: Sequence[fx.Node]) -> _Run:
        """The run that computes some nodes from the values that exist."""
        needed, left = set[fx.Node](), list(wanted)
        while left:
            node = left.pop()
            if node not in needed and node not in self._values and not self._is_constant(node):
                needed.add(node)
                left.extend(node.all_input_nodes)
        nodes = sorted(needed)
        return _Run(nodes, {node: self._constants_of(node) for node in nodes})

    def _constants_of(self, node: fx.Node) -> dict[fx.Node, Any]:
        def value(constant: fx.Node) -> Any:
            stored = weight_value(constant, self._graph, self._source)
            # Products multiply in fp32: convert the weight once, not for each sequence.
            return stored.float() if is_product(node) else stored

        constants = [n for n in node.all_input_nodes if self._is_constant(n)]
        return dict(zip(constants, parallel_map(value, constants), strict=True))

    def _computed(self, run: _Run, kept: Sequence[fx.Node], index: int) -> list[Any]:
        """Values of some nodes of a run for one sequence of one branch."""
        computed: dict[fx.Node, Any] = {}
        for node in run.nodes:
            inputs = dict(run.constants[node])
            for operand in node.all_input_nodes:
                if operand not in inputs:
                    inputs[operand] = computed[operand] if operand in computed else self._values[operand][index]
            computed[node] = self._call(node, inputs, index)
        return [computed[node] if node in computed else self._values[node][index] for node in kept]

    def _call(self, node: fx.Node, inputs: dict[fx.Node, Any], index: int) -> Any:
        """node's value for one sequence of one branch."""
        replaced = self._replaced
        if replaced is not None and replaced.branch == index // self._sequences and replaced.weight in inputs:
            inputs = inputs | {replaced.weight: replaced.value}
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), inputs.__getitem__)
        assert callable(node.target)
        return node.target(*args, **kwargs)

    def _is_constant(self, node: fx.Node) -> bool:
        """Whether a value is made only of weights."""
        known = self._constant.get(node)
        if known is None:
            if node.op == "placeholder":
                known = node.name in self._graph.weights
            else:
                known = node.op == "call_function" and all(map(self._is_constant, node.all_input_nodes))
            self._constant[node] = known
        return known
