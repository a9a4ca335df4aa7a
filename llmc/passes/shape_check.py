"""After each pass: what every changed node's op makes of its inputs is what its fake value says.

Nodes that a pass makes get their fake values from their ops (recorded_graph.py); one whose arguments a pass exchanges
keeps its own, and a kernel would read memory by it. Looked at are nodes that are new or have other arguments, and those
that read a value that was exchanged; calls that are alike are propagated once (graph/fake_value.py).
"""

from __future__ import annotations

from typing import Any

from torch import fx

from llmc.errors import PassError
from llmc.graph.fake_value import describe
from llmc.graph.source_line import source_line
from llmc.passes.recorded_graph import RecordedGraph
from llmc.passes.shapes import same_value

# What decides what a node makes, by identity: its op, its arguments, and the fake values of itself and its inputs.
_Seen = tuple[Any, ...]


class ShapeCheck:
    """Checks a graph again and again while passes change it."""

    def __init__(self, graph: RecordedGraph) -> None:
        self._graph = graph
        self._seen = {node: _state(node) for node in graph.nodes}

    def __call__(self) -> None:
        """Raise PassError for the first node that takes its inputs no more, or makes something else of them."""
        now = {node: _state(node) for node in self._graph.nodes}
        for node, state in now.items():
            before = self._seen.get(node)
            if node.op == "call_function" and (before is None or not _is_same(before, state)):
                self._check(node)
        self._seen = now

    def _check(self, node: fx.Node) -> None:
        kept, made = node.meta.get("val"), self._graph.fake_values().of(node)
        if made is not kept and not same_value(kept, made):
            shown = ", ".join(describe(each.meta.get("val")) for each in node.all_input_nodes)
            raise PassError(
                f"node {node.name}: {node.target} of ({shown}) is {describe(made)}, and the graph has it as "
                f"{describe(kept)}",
                at=source_line(node) or node.format_node(),
                fix="a pass that exchanges a node's inputs keeps their shapes and dtypes, or makes a new node",
            )


def _state(node: fx.Node) -> _Seen:
    return (
        node.target,
        node.args,
        node.kwargs,
        node.meta.get("val"),
        *(n.meta.get("val") for n in node.all_input_nodes),
    )


def _is_same(before: _Seen, now: _Seen) -> bool:
    return len(before) == len(now) and all(a is b for a, b in zip(before, now, strict=True))
