"""Take a graph apart at its llmc::hand_over: a graph for each pipeline stage, which runs on its own ranks.

    h = hand_over(f(tokens), 1); return g(h)   ->   return f(tokens)                    (stage 0)
                                                    return g(hidden)                    (stage 1)
A stage reads its incoming rows as the step input `hidden`, in fp32. In place of logits it returns the rows that it
hands over, one per token; several values are concatenated. Values that depend only on step inputs and weights are
recomputed in each stage that reads them.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from llmc.graph.dead_code import writes_memory
from llmc.graph.fake_value import fake_mode, fake_value
from llmc.graph.model_graph import ModelGraph
from llmc.graph.propagate import symbolic_input
from llmc.program import HIDDEN

aten = torch.ops.aten
_HAND_OVER = torch.ops.llmc.hand_over.default


def stage_graphs(graph: ModelGraph) -> tuple[ModelGraph, ...]:
    """Split a graph into its pipeline stages, in order. A graph without a split is its only stage."""
    if graph.pipeline_stages == 1:
        return (graph,)
    return tuple(_Stage(graph, number).extracted() for number in range(graph.pipeline_stages))


class _Stage:
    """One stage while its graph is put together."""

    def __init__(self, whole: ModelGraph, number: int) -> None:
        self._whole, self._number = whole, number
        self._graph = fx.Graph()
        self._copies: dict[fx.Node, fx.Node] = {}
        self._mode = fake_mode(whole.graph)

    def extracted(self) -> ModelGraph:
        """The graph of the stage, with its inputs."""
        whole, is_last = self._whole, self._number == self._whole.pipeline_stages - 1
        ends = whole.returned() if is_last else [node.all_input_nodes[0] for node in _handed(whole, self._number + 1)]
        needed = _needed([*ends, *_writers(whole, self._number)], _handed(whole, self._number))
        layers = [i for i in range(len(whole.caches)) if any(input_.name == f"kv_cache_{i}_k" for input_ in needed)]
        self._copy_placeholders(needed, layers)
        self._take_over()
        for node in whole.graph.nodes:
            if node in needed and node not in self._copies:
                self._copies[node] = self._graph.node_copy(node, self._copies.__getitem__)
        results = tuple(self._copies[node] for node in ends) if is_last else (self._joined(ends),)
        self._graph.output(results[0] if len(results) == 1 else results)
        self._graph.lint()
        return replace(
            whole,
            graph=self._graph,
            weights={name: recipe for name, recipe in whole.weights.items() if name in {n.name for n in needed}},
            caches=tuple(replace(whole.caches[layer], layer=i) for i, layer in enumerate(layers)),
            side_outputs=whole.side_outputs if is_last else (),
            pipeline_stage=self._number,
        )

    def _copy_placeholders(self, needed: set[fx.Node], layers: list[int]) -> None:
        """The weights that are read, the caches of the stage's own layers, and all other step inputs."""
        caches = {f"kv_cache_{layer}_{part}": f"kv_cache_{i}_{part}" for i, layer in enumerate(layers) for part in "kv"}
        for node in self._whole.graph.find_nodes(op="placeholder"):
            is_cache = node.name.startswith("kv_cache_")
            if node not in needed and (is_cache or node.name in self._whole.weights):
                continue
            copy = self._graph.placeholder(caches.get(node.name, node.name))
            copy.meta.update(node.meta)
            if is_cache:
                copy.meta["cache"] = copy.name.removeprefix("kv_cache_").replace("_", ".")
            self._copies[node] = copy
            if node.name == "positions" and self._number:
                self._hidden = self._graph.placeholder(HIDDEN)

    def _take_over(self) -> None:
        """The rows that come from the stage before, in their own shapes and dtypes."""
        handed = _handed(self._whole, self._number)
        width = sum(map(_width, handed))
        start = 0
        for node in handed:
            if not start:
                self._hidden.meta["val"] = symbolic_input(self._whole, HIDDEN, ("T", width), torch.float32)
            value, end = node.meta["val"], start + _width(node)
            rows = self._hidden
            if end - start < width:
                rows = self._call(aten.slice.Tensor, rows, 1, start, end)
            if value.dim() > 2:
                rows = self._call(aten.reshape.default, rows, [-1, *value.shape[1:]])
            self._copies[node] = self._cast(rows, value.dtype)
            start = end

    def _joined(self, values: Sequence[fx.Node]) -> fx.Node:
        """Return one row per token of all values that the next stage reads."""
        rows = []
        for node in values:
            part = self._copies[node]
            if node.meta["val"].dim() > 2:
                part = self._call(aten.reshape.default, part, [-1, _width(node)])
            rows.append(self._cast(part, torch.float32))
        return rows[0] if len(rows) == 1 else self._call(aten.cat.default, rows, 1)

    def _cast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        return node if node.meta["val"].dtype is dtype else self._call(aten._to_copy.default, node, dtype=dtype)

    def _call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        node = self._graph.call_function(target, args, kwargs)
        node.meta["val"] = fake_value(node, self._mode)
        return node


def _handed(graph: ModelGraph, number: int) -> list[fx.Node]:
    """The nodes that hand rows over to a stage."""
    handovers: Iterable[fx.Node] = graph.graph.find_nodes(op="call_function", target=_HAND_OVER)
    return [node for node in handovers if node.args[1] == number]


def _writers(graph: ModelGraph, number: int) -> list[fx.Node]:
    """The nodes of a stage that write caches: those after its hand-over and before the next one."""
    stages: dict[fx.Node, int] = {}
    for node in graph.graph.nodes:
        if node.target is _HAND_OVER:
            (stages[node],) = (argument for argument in node.args if isinstance(argument, int))
        else:
            stages[node] = max((stages[operand] for operand in node.all_input_nodes), default=0)
    return [n for n, stage in stages.items() if stage == number and n.op == "call_function" and writes_memory(n)]


def _needed(ends: Iterable[fx.Node], given: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes to compute for `ends`, including their inputs, when the nodes of `given` are known."""
    needed, waiting = set(given), list(ends)
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed.add(node)
            waiting += node.all_input_nodes
    return needed


def _width(node: fx.Node) -> int:
    return math.prod(int(size) for size in node.meta["val"].shape[1:])
