"""Norms of heads, which onnxruntime-genai writes with the rows of all tokens and heads in one axis.

    Reshape(x [B, T, heads · d], [0, -1, d]) → norm → Reshape(…, [0, -1, heads · d])
becomes
    SplitHeads(x) [B, T, heads, d] → norm → JoinHeads(…)
so that tokens keep their own axis.
"""

from dataclasses import replace

from torch import Tensor

from llmc.frontends.onnx.call import Call, Translated, Translations
from llmc.frontends.onnx.model import OnnxGraph, OnnxNode
from llmc.frontends.onnx.tensors import OnnxTensor

_DOMAIN = "llmc.import"
_NORMS = frozenset({"SimplifiedLayerNormalization", "RMSNormalization", "LayerNormalization"})


def heads_apart(graph: OnnxGraph) -> OnnxGraph:
    """The graph with such norms over an axis of heads."""
    makers = {name: node for node in graph.nodes for name in node.outputs}
    readers: dict[str, list[OnnxNode]] = {}
    for node in graph.nodes:
        for name in node.inputs:
            readers.setdefault(name, []).append(node)
    changed: dict[int, OnnxNode] = {}
    for node in graph.nodes:
        if node.op_type not in _NORMS or node.attributes.get("axis", -1) != -1:
            continue
        before, after = makers.get(node.inputs[0]), readers.get(node.outputs[0], [])
        is_only = before is not None and len(readers[node.inputs[0]]) == 1 == len(after)
        if before is None or not is_only or not _is_split(before, graph) or not _is_split(after[0], graph):
            continue
        changed[id(before)] = replace(before, domain=_DOMAIN, op_type="SplitHeads")
        changed[id(after[0])] = replace(after[0], domain=_DOMAIN, op_type="JoinHeads")
    return replace(graph, nodes=tuple(changed.get(id(node), node) for node in graph.nodes))


def _is_split(node: OnnxNode, graph: OnnxGraph) -> bool:
    """Whether it is a Reshape to [0, -1, width]."""
    shape: OnnxTensor | None = graph.tensors.get(node.inputs[1]) if node.op == "Reshape" else None
    if shape is None or shape.shape != (3,):
        return False
    first, second, width = shape.load().tolist()
    return (first, second) == (0, -1) and width > 0


def _split(call: Call) -> Translated:
    heads: Tensor = call.tensor(0).unflatten(-1, (-1, int(call.integers(1)[2])))
    return heads


def _join(call: Call) -> Translated:
    x, width = call.tensor(0).flatten(-2), int(call.integers(1)[2])
    call.unless(int(x.shape[-1]) == width, f"it makes rows of {width} out of those of {int(x.shape[-1])}")
    return x


HEAD_NORMS: Translations = {(_DOMAIN, "SplitHeads"): _split, (_DOMAIN, "JoinHeads"): _join}
