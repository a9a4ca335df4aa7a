"""The computing nodes, their inputs, and the order constraints between them."""

from itertools import pairwise

import networkx as nx
from torch import fx

from llmc.codegen.views import View, Views, operand_views, views_of
from llmc.graph.model_graph import ModelGraph
from llmc.graph.pointwise import ELEMENTARY


def is_loop_node(node: fx.Node, copies: frozenset[fx.Node], views: Views) -> bool:
    """Whether the node is computed by a loop: pointwise work other than a view, or a reshape that must copy."""
    view = views.get(node)
    return node in copies or (node.target in ELEMENTARY and isinstance(view, View) and view.value.node is node)


def computing_nodes(graph: ModelGraph, views: Views, copies: frozenset[fx.Node]) -> tuple[fx.Node, ...]:
    """The nodes that launches compute, in graph order: those with a value in memory, and those that write caches."""
    return tuple(
        node
        for node in graph.graph.nodes
        if node.op == "call_function" and (node in copies or _has_own_value(node, views) or written_arguments(node))
    )


def dependencies(graph: ModelGraph, views: Views, copies: frozenset[fx.Node]) -> nx.DiGraph:
    """Computing nodes in graph order, with edges from those whose results a node reads.

    Accesses to what some node writes in place (a cache) keep their order.
    """
    order = computing_nodes(graph, views, copies)
    written = {argument for node in order for argument in written_arguments(node)}
    accesses: dict[fx.Node, list[fx.Node]] = {node: [] for node in written}
    edges = nx.DiGraph()
    edges.add_nodes_from(order)
    for node in order:
        for source in dict.fromkeys(v.value.node for v in operand_views(node, views)):
            if source in written:
                accesses[source].append(node)
            elif source.op != "placeholder":
                edges.add_edge(source, node)
    for users in accesses.values():
        edges.add_edges_from(pairwise(users))
    return edges


def written_arguments(node: fx.Node) -> tuple[fx.Node, ...]:
    """The arguments that the node's op changes in place."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return ()
    pairs = zip(schema.arguments, node.args, strict=False)
    return tuple(a for s, a in pairs if isinstance(a, fx.Node) and s.alias_info is not None and s.alias_info.is_write)


def _has_own_value(node: fx.Node, views: Views) -> bool:
    return any(view.value.node is node for view in views_of(node, views))
