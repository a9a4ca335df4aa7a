"""Check after each pass that the op of every changed node yields its fake value.

Nodes that a pass makes get their fake values from their ops (recorded_graph.py); one whose arguments a pass exchanges
keeps its own, and a kernel would read memory by it. The check covers nodes that are new or have other arguments, and
those that read an exchanged value; equal calls are propagated once (graph/fake_value.py). Each replacement
of a pattern pass is checked against its root's shape when it is made (runner.py), so such passes are only followed.
"""

from typing import Any

from torch import fx

from llmc.errors import PassError
from llmc.graph.fake_value import describe
from llmc.graph.source_line import source_line
from llmc.passes.recorded_graph import RecordedGraph
from llmc.passes.shapes import same_value


class ShapeCheck:
    """Follows a graph while passes change it."""

    def __init__(self, graph: RecordedGraph) -> None:
        self._graph = graph
        # The inputs that determine a node's result, compared by identity: its arguments and its fake value.
        self._seen: dict[fx.Node, tuple[Any, Any, Any]] = {}
        self.follow()

    def follow(self) -> set[fx.Node]:
        """Take the graph as it is; the calls that were added or changed since the last time, or read what was."""
        now, changed = {}, set()
        for node in self._graph.nodes:
            state = now[node] = (node.args, node.kwargs, node.meta.get("val"))
            before = self._seen.get(node) or self._graph.fresh.get(node)
            if before is None:
                changed.add(node)
            elif before[0] is not state[0] or before[1] is not state[1] or before[2] is not state[2]:
                changed.add(node)
                if before[2] is not state[2]:
                    changed.update(node.users)
        self._graph.fresh.clear()
        self._seen = now
        return {node for node in changed if node.op == "call_function"}

    def check(self) -> None:
        """Raise PassError for the first node that takes its inputs no more, or makes something else of them."""
        changed = self.follow()
        for node in self._graph.nodes if changed else ():
            if node in changed:
                self._check(node)

    def _check(self, node: fx.Node) -> None:
        kept, computed = node.meta.get("val"), self._graph.fakes.of(node)
        if computed is not kept and not same_value(kept, computed):
            shown = ", ".join(describe(operand.meta.get("val")) for operand in node.all_input_nodes)
            raise PassError(
                f"node {node.name}: {node.target} of ({shown}) is {describe(computed)}, and the graph has it as "
                f"{describe(kept)}",
                at=source_line(node) or node.format_node(),
                fix="a pass that exchanges a node's inputs keeps their shapes and dtypes, or makes a new node",
            )
