"""Small graphs that show what a pass does: `llmc prove` makes one of each pattern; whole-graph passes have theirs."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.fx.proxy import GraphAppendingTracer

from llmc.graph.fake_value import FakeValues
from llmc.graph.model_graph import CacheSpec, ModelGraph, ModelInfo
from llmc.graph.stage import Stage
from llmc.graph.weights import Stored
from llmc.options import BuildOptions
from llmc.passes.recorded_graph import RecordedGraph

# The value of "T" in a shape when a graph runs.
TOKENS = 3
Body = Callable[..., Any]


@dataclass(frozen=True)
class Example:
    """A graph of a few ops, drawn by calling them on the body's parameters.

    values: what each parameter is: a float32 tensor as its shape, in which "T" is the count of the step's tokens; an
    integer tensor as it is; any other constant. weights: which of them are weights. cache: the KV cache of a graph that
    has one. options: the options with which a pass is run on it.
    """

    body: Body
    values: Mapping[str, Any]
    weights: frozenset[str] = frozenset()
    cache: CacheSpec | None = None
    options: BuildOptions = field(default_factory=BuildOptions)

    def graph(self, stage: Stage = Stage.CAPTURED, fakes: "ExampleFakes | None" = None) -> ModelGraph:
        """The graph; its nodes have fake values. fakes: those of similar graphs, which are made once."""
        fakes = fakes or ExampleFakes()
        nodes = RecordedGraph(fakes.values)
        tracer = GraphAppendingTracer(nodes)
        placeholders = {name: nodes.placeholder(name) for name, value in self.values.items() if _is_tensor(value)}
        for name, node in placeholders.items():
            node.meta["val"] = fakes.input(self.values[name])
        nodes.record("example", None)
        proxies = {name: fx.Proxy(node, tracer) for name, node in placeholders.items()}
        result = self.body(**{**self.values, **proxies})
        several = result if isinstance(result, tuple) else (result,)
        nodes.output(tuple(m.node if isinstance(m, fx.Proxy) else m for m in several))
        recipes = {placeholders[name].name: Stored(name, torch.float32) for name in sorted(self.weights & set(proxies))}
        info = ModelInfo("example", "example", 1, None, torch.float32)
        caches = () if self.cache is None else (self.cache,)
        return ModelGraph(nodes, stage, dict(recipes), info, caches, fakes=nodes.fakes)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, tuple) and all(isinstance(d, int | str) for d in value))


class ExampleFakes:
    """Fake values of graphs that share one count of tokens. values: the fake values of their calls."""

    def __init__(self) -> None:
        self.values = FakeValues()
        self._mode = FakeTensorMode(shape_env=ShapeEnv())

    @functools.cached_property
    def _tokens(self) -> Any:
        """Their count."""
        counted = self._mode.from_tensor(
            torch.zeros(TOKENS),
            symbolic_context=StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC]),
            source=ConstantSource("tokens"),
        )
        return counted.shape[0]

    def input(self, value: Any) -> Tensor:
        """An input with a given shape, or like a tensor, whose first axis counts tokens if it has that length."""
        shape = (
            ["T" if i == 0 and d == TOKENS else d for i, d in enumerate(value.shape)]
            if isinstance(value, Tensor)
            else value
        )
        sizes: list[Any] = [self._tokens if size == "T" else size for size in shape]
        dtype = value.dtype if isinstance(value, Tensor) else torch.float32
        with self._mode:
            return torch.empty(sizes, dtype=dtype)
