"""Leave some elements of a class of axes out of a graph: rows and columns of weights, heads and channels of values."""

import torch
from torch import Tensor

from llmc.graph.model_graph import ModelGraph
from llmc.graph.weights import Constant, Derived
from llmc.passes.parallel.propagate_placements import NodeAxis, Placements, Scale
from llmc.passes.parallel.resized_axes import resize_calls, resize_values
from llmc.passes.pruning.inner_axes import InnerAxes

aten = torch.ops.aten


def keep_units(graph: ModelGraph, placements: Placements, inner: InnerAxes, kept: Tensor) -> None:
    """Remove the other units of an axis from the graph and from its weights.

    kept: numbers of the units that stay, ascending, int64. Recipes of weights select their elements while they stream.
    """
    scales = {place: placements.scale(*place) for place in inner.axes.members}
    for node, axis in inner.weights:
        elements = Constant(elements_of(kept, inner.unit, scales[node, axis]))
        graph.weights[node.name] = Derived(aten.index_select.default, (graph.weights[node.name], axis, elements))

    def length(place: NodeAxis) -> int:
        return len(kept) * (inner.unit // scales[place].per) * scales[place].unit

    resize_values(inner.axes, length)
    resize_calls(graph, placements, inner.axes, length)


def elements_of(units: Tensor, unit: int, scale: Scale) -> Tensor:
    """The elements of an axis that go with some units of its class."""
    width = unit // scale.per * scale.unit
    return (units[:, None] * width + torch.arange(width)).flatten()
