"""Where a decoder's hidden states are: the one tensor that a layer hands to the next, found by the graph's structure.

All that a layer does reaches the output through one tensor, and from there on the next layer's attention. So the hidden
state before layer i + 1 is the last node on the way from layer i's attention towards the output that every path goes
through (the post-dominators of the attention) and that the next attention still depends on. Names and the structure of
layers do not matter: norms before or after, parallel branches, biases and casts all end there.
"""

import networkx as nx
import torch
from torch import fx

from llmc.graph.model_graph import ModelGraph
from llmc.graph.refusal import Refusal

_ATTENTION = torch.ops.llmc.attention.default
_NORMS = frozenset({torch.ops.llmc.rms_norm.default, torch.ops.llmc.layer_norm.default})


def attentions(graph: ModelGraph) -> list[fx.Node]:
    """Return the attention node of each layer, in order."""
    return list(graph.graph.find_nodes(op="call_function", target=_ATTENTION))


def output_reads(graph: ModelGraph) -> fx.Node:
    """The input of the output matrix: the hidden state after the last norm."""
    (head,) = graph.graph.find_nodes(op="call_function", target=torch.ops.llmc.lm_head.default)
    x: fx.Node = head.args[0]
    return x


def hidden_states(graph: ModelGraph) -> list[fx.Node | Refusal]:
    """The hidden states of a canonical graph: entry i is the state before layer i, the last entry the state after all
    layers. An entry is a Refusal if no single tensor holds that state."""
    layers = attentions(graph)
    edges = _edges(graph)
    logits = graph.logits()
    above = nx.immediate_dominators(edges.reverse(copy=False), logits)
    states: list[fx.Node | Refusal] = []
    before: fx.Node | None = None
    for attention in layers:
        start = graph.inputs()[0] if before is None else before
        reached = nx.ancestors(edges, attention)
        chain = [node for node in _chain(start, above) if node in reached]
        states.append(_state(graph, chain, attention))
        before = attention
    states.append(_after_all(graph, states))
    return states


def _after_all(graph: ModelGraph, states: list[fx.Node | Refusal]) -> fx.Node:
    """Return the state after all layers, without the last norm unless layers themselves end in a norm."""
    last = output_reads(graph)
    ends_in_norm = isinstance(states[-1], fx.Node) and len(states) > 1 and states[-1].target in _NORMS
    source = last.args[0] if last.target in _NORMS and not ends_in_norm else last
    assert isinstance(source, fx.Node)
    return source


def _edges(graph: ModelGraph) -> nx.DiGraph:
    edges = nx.DiGraph()
    for node in graph.graph.nodes:
        if node.op != "output":
            edges.add_node(node)
            edges.add_edges_from((source, node) for source in node.all_input_nodes)
    return edges


def _chain(start: fx.Node, above: dict[fx.Node, fx.Node]) -> list[fx.Node]:
    """The nodes on every path from a node to the logits, in order, without the node itself."""
    chain: list[fx.Node] = []
    node = start
    while node in above and above[node] is not node and above[node] is not None:
        node = above[node]
        chain.append(node)
    return chain


def _state(graph: ModelGraph, chain: list[fx.Node], attention: fx.Node) -> fx.Node | Refusal:
    """The last of them that is a row a token in the width of the hidden states."""
    width = output_reads(graph).meta["val"].shape
    for node in reversed(chain):
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.dim() == 2 and value.shape[1] == width[1]:
            return node
    return Refusal(
        f"no single tensor goes from one layer to the next before {attention.name}: there is no hidden state to tap",
        attention,
    )
