"""Group the pointwise, broadcast and reduction work that is left in a graph into loops.

Two groups become one if they run over the same space, if what one reads of the other is what the loop has just
computed, and if nothing outside lies between them (convexity: the graph of groups stays acyclic). The gain is the
bytes that no longer move: a result that stays in registers, an operand that is read once. Pairs are taken by falling
gain until none is left.
"""

import math
from dataclasses import dataclass
from itertools import combinations, pairwise

import networkx as nx
from torch import fx

from llmc.codegen.dependencies import dependencies, is_loop_node
from llmc.codegen.loop_space import Space, merged_space, reads_in_place, result_view, space_of
from llmc.codegen.views import Value, Views, operand_views
from llmc.graph.model_graph import ModelGraph
from llmc.graph.pointwise import reduces
from llmc.program import RowCount

# A step's size that gains are compared at; only their order matters.
_NOMINAL_ROWS = {RowCount.TOKENS: 64, RowCount.LOGIT_ROWS: 8, RowCount.ONE: 1}


@dataclass(frozen=True)
class Group:
    """Nodes, in graph order, that one loop computes over `space`."""

    nodes: tuple[fx.Node, ...]
    space: Space


def fuse_groups(graph: ModelGraph, views: Views, copies: frozenset[fx.Node]) -> tuple[Group, ...]:
    """Put every loop node into exactly one group, and return the groups in the order of their first nodes."""
    edges = dependencies(graph, views, copies)
    fusion = _Fusion(edges, views, copies)
    candidates = _candidates(edges, views, copies, fusion)
    while sum(fusion.merge(a, b) for _, a, b in candidates):  # a merge can make another one legal
        pass
    return fusion.groups()


class _Fusion:
    """The current groups of nodes, as a graph whose nodes are groups."""

    def __init__(self, edges: nx.DiGraph, views: Views, copies: frozenset[fx.Node]) -> None:
        self._views, self._copies = views, copies
        self._edges = edges.copy()
        self.index = {node: i for i, node in enumerate(edges)}
        self._home = {node: node for node in edges}
        self._members = {node: [node] for node in edges}
        self._space = {n: space_of(n, views, copies) for n in edges if is_loop_node(n, copies, views)}

    def groups(self) -> tuple[Group, ...]:
        groups = [Group(tuple(sorted(self._members[h], key=self.index.__getitem__)), s) for h, s in self._space.items()]
        return tuple(sorted(groups, key=lambda g: self.index[g.nodes[0]]))

    def merge(self, a: fx.Node, b: fx.Node) -> bool:
        """Put the groups of two loop nodes together if that is legal; False if they are one already or must not be."""
        a, b = self._home[a], self._home[b]
        if a is b:
            return False
        space = merged_space(self._space[a], self._space[b])
        if space is None or not self._agree(a, b, space) or self._path_outside(a, b) or self._path_outside(b, a):
            return False
        self._space[a] = space
        del self._space[b]
        for node in self._members[b]:
            self._home[node] = a
        self._members[a] += self._members.pop(b)
        self._edges.add_edges_from((a, n) for n in self._edges.successors(b) if n is not a)
        self._edges.add_edges_from((n, a) for n in self._edges.predecessors(b) if n is not a)
        self._edges.remove_node(b)
        return True

    def _agree(self, a: fx.Node, b: fx.Node, space: Space) -> bool:
        members = {*self._members[a], *self._members[b]}
        for node in members:
            if node not in self._copies and reduces(node) and space_of(node, self._views, self._copies) != space:
                return False
            for view in operand_views(node, self._views):
                producer = view.value.node
                if producer in members:
                    result = result_view(producer, self._views, self._copies)
                    if not reads_in_place(view, result.value, result, space):
                        return False
        return True

    def _path_outside(self, a: fx.Node, b: fx.Node) -> bool:
        """Whether b is reached from a through another group. A group that starts after b ends leads nowhere."""
        end = max(self.index[n] for n in self._members[b])
        pending = [n for n in self._edges.successors(a) if n is not b]
        seen = set(pending)
        while pending:
            group = pending.pop()
            for following in self._edges.successors(group):
                if following is b:
                    return True
                if following not in seen and min(self.index[n] for n in self._members[following]) < end:
                    seen.add(following)
                    pending.append(following)
        return False


def _candidates(
    edges: nx.DiGraph, views: Views, copies: frozenset[fx.Node], fusion: _Fusion
) -> list[tuple[int, fx.Node, fx.Node]]:
    """(bytes saved, first, second) of loop nodes that read each other or the same value, the best first."""
    gains: dict[tuple[fx.Node, fx.Node], int] = {}
    readers: dict[Value, dict[fx.Node, None]] = {}
    for node in edges:
        if is_loop_node(node, copies, views):
            for view in operand_views(node, views):
                readers.setdefault(view.value, {})[node] = None
    for value, nodes in readers.items():
        if value.node in edges and is_loop_node(value.node, copies, views):
            saved = _nbytes(value) * (2 if len(value.node.users) == 1 else 1)
            for node in nodes:
                gains[value.node, node] = gains.get((value.node, node), 0) + saved
        # Neighbours are enough: merging is repeated, and two far readers seldom have nothing between them.
        for first, second in pairwise(nodes) if len(nodes) > 4 else combinations(nodes, 2):
            gains[first, second] = gains.get((first, second), 0) + _nbytes(value)
    candidates = [(saved, a, b) for (a, b), saved in gains.items()]
    return sorted(candidates, key=lambda c: (-c[0], fusion.index[c[1]], fusion.index[c[2]]))


def _nbytes(value: Value) -> int:
    return math.prod((value.columns, _NOMINAL_ROWS[value.rows], value.dtype.itemsize))
