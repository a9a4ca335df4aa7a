"""The linear layers of a captured graph that adapters may change while the engine runs, as adapters call them."""

from collections import Counter

import torch
from torch import fx

from llmc.adapters.module_name import tail
from llmc.graph.model_graph import Adaptable, ModelGraph
from llmc.graph.weights import stored_names

aten = torch.ops.aten
# In GPT-2's Conv1D the weight is [inputs, outputs].
WEIGHT_ON_THE_RIGHT = frozenset({aten.addmm.default, aten.mm.default, aten.matmul.default, aten.bmm.default})


def adaptable_layers(graph: ModelGraph) -> tuple[Adaptable, ...]:
    """Return the layers that adapters may change, in the order of their weights. Two layers with the same name are left
    out."""
    layers = [layer for node in graph.weight_nodes() if (layer := _layer(graph, node)) is not None]
    counts = Counter(layer.name for layer in layers)
    return tuple(layer for layer in layers if counts[layer.name] == 1)


def _layer(graph: ModelGraph, weight: fx.Node) -> Adaptable | None:
    names = stored_names(graph.weights[weight.name])
    value = weight.meta["val"]
    if not names or value.dim() != 2:
        return None
    rows, columns = map(int, value.shape)
    if all(user.target is aten.linear.default for user in weight.users):
        return Adaptable(tail(names[0].removesuffix(".weight")), columns, rows)
    if all(user.target in WEIGHT_ON_THE_RIGHT and user.args[-1] is weight for user in weight.users):
        return Adaptable(tail(names[0].removesuffix(".weight")), rows, columns)
    return None
