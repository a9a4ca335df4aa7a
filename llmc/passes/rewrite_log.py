"""The numbered record of rewrites and near-misses, kept while the pipeline runs."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch import fx

from llmc.graph.pass_record import NodeRecord, RefusalRecord, RewriteRecord
from llmc.graph.refusal import Refusal, Refused
from llmc.graph.render import op_name, render_type
from llmc.graph.source_line import source_line
from llmc.passes.recorded_graph import RecordedGraph


class PipelineCut(BaseException):
    """Raised by RewriteLog.step when the rewrites asked for are done; only the runner catches it."""


class RewriteLog:
    """Numbers every rewrite of a pipeline, from 1 on, and cuts the pipeline before number stop_after + 1.

    Args:
        graph: The graph that is rewritten, which records the nodes that each rewrite makes.
        stop_after: Number of the last rewrite; None for all.
        announce: Called with the pass's name and each rewrite's record before anything is changed for it.
    """

    def __init__(
        self,
        graph: RecordedGraph,
        stop_after: int | None,
        announce: Callable[[str, RewriteRecord], None] | None = None,
    ) -> None:
        self._graph = graph
        self._stop_after = stop_after
        self._announce = announce
        self._count = 0
        self._pass_name = ""
        self._may_cut = True
        self._prefix = ""
        self._rewrites: list[RewriteRecord] = []
        self._refusals: dict[Refusal, RefusalRecord] = {}
        self._history: list[RefusalRecord] = []

    @property
    def count(self) -> int:
        """Number of rewrites made until now."""
        return self._count

    def begin_pass(self, name: str, *, may_cut: bool = True, is_added: bool = False) -> None:
        """Start the record of a pass.

        Args:
            name: The name of the pass.
            may_cut: False for a pass that runs to its end, whatever stop_after is.
            is_added: Whether it is not one of llmc's own passes.
        """
        self._history.extend(self.refusals())
        self._pass_name = name
        self._may_cut = may_cut
        self._prefix = f"{name}_" if is_added else ""
        self._rewrites = []
        self._refusals = {}

    def step(self, description: str, *nodes: fx.Node) -> None:
        """Announce one rewrite, before anything is changed for it.

        Args:
            description: The rewrite, as reports show it.
            *nodes: The nodes that it is about. New nodes inherit the source line of the first one that has it.

        Raises:
            PipelineCut: If the pipeline ends before this rewrite.
        """
        if self._may_cut and self._stop_after is not None and self._count >= self._stop_after:
            raise PipelineCut
        source = next((n for n in nodes if n.meta.get("stack_trace")), None)
        names = tuple(n.name for n in nodes)
        record = RewriteRecord(self._count + 1, description, names, source_line(source) if source else None)
        if self._announce is not None:
            self._announce(self._pass_name, record)
        self._count += 1
        self._rewrites.append(record)
        self._graph.record(self._title(self._count), source.meta["stack_trace"] if source else None, self._prefix)

    def refuse(self, refusal: Refusal) -> None:
        """Record a near-miss.

        Args:
            refusal: The reason. The same reason at the same node is recorded once.
        """
        if refusal not in self._refusals:
            self._refusals[refusal] = _refusal_record(refusal)

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Return a context manager that records a Refused raised in its block, and continues after the block."""
        try:
            yield
        except Refused as refused:
            self.refuse(refused.refusal)

    def drop_refusals(self) -> None:
        """Forget this pass's near-misses, before the candidates are examined again."""
        self._refusals = {}

    def rewrites(self) -> tuple[RewriteRecord, ...]:
        """Return the rewrites of the current pass.

        Returns:
            The records in the order of the rewrites, each with the names of the nodes that it made.
        """
        created = self._graph.made
        return tuple(replace(r, made=tuple(created.get(self._title(r.number), ()))) for r in self._rewrites)

    def history(self) -> tuple[RefusalRecord, ...]:
        """Return the near-misses of earlier passes, for contracts that explain what was not rewritten.

        Returns:
            The records of all passes before this one, in the order in which they were found.
        """
        return tuple(self._history)

    def refusals(self) -> tuple[RefusalRecord, ...]:
        """Return the near-misses of the current pass.

        Returns:
            The records in the order in which they were found, without those that `drop_refusals` dropped.
        """
        return tuple(self._refusals.values())

    def _title(self, number: int) -> str:
        return f"#{number} {self._pass_name}"


def _refusal_record(refusal: Refusal) -> RefusalRecord:
    """The record of a refusal with the node's current text, because later rewrites may change or erase the node.

    Unless it gives them, both sides of "…, expected …" and the users in the way are read off its reason.
    """
    node = refusal.node
    found, says_expected, expected = refusal.reason.partition(", expected ")
    named = set(re.findall(r"\w+", refusal.reason))
    extra = refusal.users or tuple(user for user in node.users if user.name in named)
    return RefusalRecord(
        reason=refusal.reason,
        node=node.name,
        source=source_line(node),
        expected=refusal.expected or (expected if says_expected else None),
        found=refusal.found or (found if says_expected else None),
        op=op_name(node.target) if node.op == "call_function" else node.op,
        type=render_type(node),
        operands=tuple(_node_record(n) for n in node.all_input_nodes),
        users=tuple(_node_record(n) for n in node.users),
        extra_users=tuple(n.name for n in extra),
        is_asked=refusal.is_asked,
    )


def _node_record(node: fx.Node) -> NodeRecord:
    op = op_name(node.target) if node.op == "call_function" else node.op
    kind = "" if node.op == "output" else render_type(node)
    return NodeRecord(node.name, op, kind, source_line(node))
