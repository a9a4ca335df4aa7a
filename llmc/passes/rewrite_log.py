"""The numbered record of rewrites and near-misses, kept while the pipeline runs."""

from __future__ import annotations

from torch import fx

from llmc.graph.refusal import Refusal
from llmc.graph.source_line import source_line
from llmc.passes.recorded_graph import RecordedGraph
from llmc.passes.report import RefusalRecord, RewriteRecord


class PipelineCut(BaseException):
    """Raised by RewriteLog.step when the rewrites asked for are done; only the runner catches it."""


class RewriteLog:
    """Numbers every rewrite of a pipeline, from 1 on, and cuts the pipeline before number stop_after + 1."""

    def __init__(self, graph: RecordedGraph, stop_after: int | None) -> None:
        self._graph = graph
        self._stop_after = stop_after
        self._count = 0
        self._pass_name = ""
        self._rewrites: list[RewriteRecord] = []
        self._refusals: list[Refusal] = []
        self._history: list[RefusalRecord] = []

    @property
    def count(self) -> int:
        """How many rewrites were made so far."""
        return self._count

    def begin_pass(self, name: str) -> None:
        """Start the record of a pass."""
        self._history.extend(self.refusals())
        self._pass_name = name
        self._rewrites = []
        self._refusals = []

    def step(self, description: str, *nodes: fx.Node) -> None:
        """Announce one rewrite, before anything is changed for it.

        nodes: those it is about; new nodes inherit the source line of the first one that has it.
        """
        if self._stop_after is not None and self._count >= self._stop_after:
            raise PipelineCut
        self._count += 1
        source = next((n for n in nodes if n.meta.get("stack_trace")), None)
        names = tuple(n.name for n in nodes)
        self._rewrites.append(RewriteRecord(self._count, description, names, source_line(source) if source else None))
        self._graph.record(f"#{self._count} {self._pass_name}", source.meta["stack_trace"] if source else None)

    def refuse(self, refusal: Refusal) -> None:
        """Record a near-miss; the same reason at the same node is recorded once."""
        if refusal not in self._refusals:
            self._refusals.append(refusal)

    def drop_refusals(self) -> None:
        """Forget this pass's near-misses, before the candidates are looked at again."""
        self._refusals = []

    def rewrites(self) -> tuple[RewriteRecord, ...]:
        """The rewrites of the pass under way."""
        return tuple(self._rewrites)

    def history(self) -> tuple[RefusalRecord, ...]:
        """The near-misses of all passes before this one, for contracts that explain what was left over."""
        return tuple(self._history)

    def refusals(self) -> tuple[RefusalRecord, ...]:
        """The near-misses of the pass under way, in the order in which they were found."""
        return tuple(RefusalRecord(r.reason, r.node.name, source_line(r.node)) for r in self._refusals)
