"""The part of a graph that the logits need: nodes in order, constants as tensors, and tensors derived from
positions."""

from collections.abc import Iterable
from dataclasses import replace

from llmc.frontends.onnx.model import OnnxGraph, OnnxModel, OnnxNode
from llmc.frontends.onnx.tensors import OnnxTensor, damaged

# Tables that are read at the positions: weights like any other.
_LOOKUPS = frozenset({("Gather", 0)})
_LARGEST_CONSTANT = 1 << 24


def needed_graph(model: OnnxModel, logits: str) -> OnnxGraph:
    """The graph without nodes that only the cache needs, and with Constant nodes as tensors.

    Raises CheckpointError for a node that reads what no earlier one makes.
    """
    graph = model.graph
    kept: list[OnnxNode] = []
    wanted = {logits}
    for node in reversed(graph.nodes):
        if wanted & {*node.outputs}:
            kept.append(node)
            wanted |= set(reads(node))
    tensors, nodes = dict(graph.tensors), []
    known = {value.name for value in graph.inputs} | tensors.keys() | {""}
    for node in reversed(kept):
        missing = [name for name in reads(node) if name not in known]
        if missing or any(name in known for name in node.outputs if name):
            problem = f"reads {missing[0]!r:.80}, which no earlier node makes" if missing else "makes what is there"
            raise damaged(f"{node.label} {problem}", model.file)
        known |= {*node.outputs}
        value = node.attributes.get("value") if node.op == "Constant" else None
        if isinstance(value, OnnxTensor) and len(node.outputs) == 1:
            tensors[node.outputs[0]] = replace(value, name=node.outputs[0])
        else:
            nodes.append(node)
    if logits not in known:
        raise damaged(f"no node makes its output {logits!r:.80}", model.file)
    used = {name for node in nodes for name in reads(node)} | {logits}
    return OnnxGraph(
        tuple(nodes), graph.inputs, graph.outputs, {name: t for name, t in tensors.items() if name in used}
    )


def reads(node: OnnxNode) -> Iterable[str]:
    """The names that a node reads, including those that its subgraphs read from outside."""
    yield from (name for name in node.inputs if name)
    for graph in (value for value in node.attributes.values() if isinstance(value, OnnxGraph)):
        own = {value.name for value in graph.inputs} | graph.tensors.keys()
        for inner in graph.nodes:
            yield from (name for name in reads(inner) if name not in own)
            own |= {*inner.outputs}
        yield from (value.name for value in graph.outputs if value.name not in own)


def positional_tensors(graph: OnnxGraph, ids: str) -> frozenset[str]:
    """The tensors that are computed with positions before any token is: frequencies of rotation, stored masks.

    Passes read their values, so they are constants of the graph, unless they are tables that positions look up.
    """
    # The kinds of values: stored, derived from positions and lengths, or dependent on tokens.
    stored: dict[str, frozenset[str]] = {name: frozenset({name}) for name in graph.tensors}
    tokens, positional = {ids}, set[str]()
    counted = {value.name for value in graph.inputs if value.name != ids}
    for node in graph.nodes:
        names = [*reads(node)]
        if node.op in ("Shape", "Size"):
            counted |= {*node.outputs}
        elif any(name in tokens for name in names):
            tokens |= {*node.outputs}
        elif any(name in counted for name in names):
            counted |= {*node.outputs}
            tables = {name for index, name in enumerate(node.inputs) if (node.op, index) in _LOOKUPS}
            positional |= {origin for name in names if name in stored and name not in tables for origin in stored[name]}
        else:
            origins = frozenset(origin for name in names for origin in stored.get(name, frozenset()))
            stored |= dict.fromkeys(node.outputs, origins)
    tensors = (graph.tensors[name] for name in positional)
    return frozenset(tensor.name for tensor in tensors if tensor.numel * tensor.dtype.itemsize <= _LARGEST_CONSTANT)
