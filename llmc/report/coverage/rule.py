"""How one kind of operation is recognised in a graph: once the pipeline has done with it, and while it is left over."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from torch import fx
from torch._ops import OpOverload

from llmc.graph.model_graph import ModelGraph
from llmc.graph.op_record import OpRecord, record_of
from llmc.graph.stage import Stage
from llmc.options import BuildOptions

# A selection of llmc:: ops by their records.
Ops = Callable[[OpRecord], bool]
Finder = Callable[[ModelGraph], list[fx.Node]]

# A norm or an attention written in aten ops spans at most this many ops.
_NEIGHBOURHOOD = 8


def named(*overloads: OpOverload) -> Ops:
    """Return these ops and no others."""
    return lambda record: record.overload in overloads


@dataclass(frozen=True)
class CoverageRule:
    """A rule that counts what a pass was to reach. stages: the stages of the graphs that are counted; the last one
    decides. what, verb: as in "6 of 6 attentions paged". done: the ops that show one each, or where not each call of
    them is one, in `count` how many a graph has. left: what shows one each that is not done: ops, or nodes of a graph.

    passes: the passes whose refusals explain leftovers. reach: maximum distance in uses between a refusal's node and
    the leftover that it explains. is_wanted: whether the rule applies to a graph.
    """

    stages: frozenset[Stage]
    what: str
    verb: str
    passes: tuple[str, ...]
    done: Ops
    left_ops: Ops = lambda record: False
    left_nodes: Finder = lambda graph: []
    count: Callable[[ModelGraph], int] | None = None
    reach: int = _NEIGHBOURHOOD
    is_wanted: Callable[[ModelGraph, BuildOptions], bool] = lambda graph, options: True

    def number_done(self, graph: ModelGraph) -> int:
        """The number of reached places in a graph."""
        return self.count(graph) if self.count is not None else len(calls_of(graph, self.done))

    def left(self, graph: ModelGraph) -> list[fx.Node]:
        """The nodes of a graph that are not done, each standing for one."""
        return [*calls_of(graph, self.left_ops), *self.left_nodes(graph)]


canonical = partial(CoverageRule, frozenset({Stage.CAPTURED, Stage.CANONICAL}))
serving = partial(CoverageRule, frozenset({Stage.SERVING, Stage.OPTIMIZED}))


def calls(graph: ModelGraph) -> Iterable[fx.Node]:
    """The nodes that compute."""
    return (n for n in graph.graph.nodes if n.op == "call_function")


def calls_of(graph: ModelGraph, ops: Ops) -> list[fx.Node]:
    """The calls of these ops, in graph order."""
    return [n for n in calls(graph) if (record := record_of(n)) is not None and ops(record)]


def calls_to(graph: ModelGraph, *targets: object) -> list[fx.Node]:
    """The calls of these functions, aten's ops among them, in graph order."""
    return [n for n in calls(graph) if n.target in targets]
