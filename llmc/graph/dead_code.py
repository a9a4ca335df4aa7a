"""Take out what nothing uses: ops without side effects, and weights."""

from torch import fx
from torch._ops import OpOverload

from llmc.graph.model_graph import ModelGraph


def remove_dead_code(graph: ModelGraph) -> None:
    """Erase unused ops, last first, then unused weight placeholders with their recipes. Step inputs stay."""
    for node in reversed(list(graph.graph.nodes)):
        if node.op == "call_function" and not node.users and not writes_memory(node):
            graph.graph.erase_node(node)
    for node in graph.weight_nodes():
        if not node.users:
            graph.graph.erase_node(node)
            del graph.weights[node.name]


def writes_memory(node: fx.Node) -> bool:
    """Whether the op writes one of its arguments, as kv_write does."""
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable
