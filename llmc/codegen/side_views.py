"""A step's side outputs: where they lie, and which nodes are computed for nothing else.

Launches for such nodes run only in steps that need one of their side outputs, so other steps do not pay for them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import networkx as nx
from torch import fx

from llmc.codegen.dependencies import written_arguments
from llmc.codegen.origin import unsupported
from llmc.codegen.views import View, Views
from llmc.graph.model_graph import ModelGraph


@dataclass(frozen=True)
class SideViews:
    """The views of a graph's side outputs. views: by name. needed_by: the side outputs that need a node, of nodes that
    neither logits nor caches need."""

    views: Mapping[str, View]
    needed_by: Mapping[fx.Node, frozenset[str]]

    @staticmethod
    def of(graph: ModelGraph, views: Views, output: View, edges: nx.DiGraph) -> "SideViews":
        """Find the views of a graph's side outputs, and what each of them needs.

        edges: from computing nodes to those that read their results.
        """
        sides = {name: _view(name, node, views) for name, node in graph.sides().items()}
        if not sides:
            return SideViews({}, {})
        always = _needed([output.value.node, *(node for node in edges if written_arguments(node))], edges)
        needed_by: dict[fx.Node, frozenset[str]] = {}
        for name, view in sides.items():
            for node in _needed([view.value.node], edges) - always:
                needed_by[node] = needed_by.get(node, frozenset()) | {name}
        return SideViews(sides, needed_by)

    def of_nodes(self, nodes: Iterable[fx.Node]) -> tuple[str, ...]:
        """The side outputs for which only these nodes run; none if they are needed anyway."""
        needs = [self.needed_by.get(node) for node in nodes]
        if None in needs:
            return ()
        return tuple(name for name in self.views if any(need is not None and name in need for need in needs))


def _view(name: str, node: fx.Node, views: Views) -> View:
    view = views[node]
    if not isinstance(view, View) or view.value.node.op == "placeholder":
        raise unsupported(node, f"the side output {name} is not a tensor that the step computes", "return another one")
    return view


def _needed(nodes: Iterable[fx.Node], edges: nx.DiGraph) -> set[fx.Node]:
    needed = set(nodes)
    return needed.union(*(nx.ancestors(edges, node) for node in needed if node in edges))
