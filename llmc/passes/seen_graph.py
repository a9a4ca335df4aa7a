"""Whether a pass has changed anything of a graph. Most change nothing of a model, and leave nothing to check."""

from dataclasses import fields
from operator import is_
from typing import Any

from llmc.graph.model_graph import ModelGraph

_FIELDS = tuple(field.name for field in fields(ModelGraph) if field.name not in ("graph", "weights"))


class SeenGraph:
    """A graph as it was when it was last checked, by the identity of its parts, which nothing changes in place."""

    def __init__(self) -> None:
        self._parts: list[Any] = []

    def see(self, graph: ModelGraph) -> None:
        """Take the graph as it is for checked."""
        self._parts = _parts(graph)

    def is_this(self, graph: ModelGraph) -> bool:
        """Whether the graph is as it was."""
        now = _parts(graph)
        return len(now) == len(self._parts) and all(map(is_, now, self._parts))


def _parts(graph: ModelGraph) -> list[Any]:
    parts = [getattr(graph, name) for name in _FIELDS]
    for weight in graph.weights.items():
        parts += weight
    for node in graph.graph.nodes:
        parts += node, node.name, node.op, node.target, node.args, node.kwargs, node.meta.get("val")
    return parts
