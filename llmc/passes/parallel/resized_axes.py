"""Give all axes of a class other lengths: what values look like then, and the sizes that calls name."""

from collections.abc import Callable, Collection
from typing import cast

import torch
from torch import Tensor, fx

from llmc.graph.model_graph import ModelGraph
from llmc.passes.parallel.equal_pieces import resize_slice
from llmc.passes.parallel.propagate_placements import AxesClass, NodeAxis, Placements
from llmc.passes.shapes import same_value

aten = torch.ops.aten
# Their second argument is the shape of the result.
_NAME_SIZES = (aten.reshape.default, aten.view.default, aten.expand.default)
# How long an axis of the class becomes.
LengthOf = Callable[[NodeAxis], int]


def resize_values(axes: AxesClass, length_of: LengthOf, whole: Collection[fx.Node] = ()) -> None:
    """Resize the fake values of all nodes with an axis of the class, except those that stay whole."""
    for node, axis in axes.members:
        if node not in whole:
            value: Tensor = node.meta["val"]
            length = length_of((node, axis))
            node.meta["val"] = value.new_empty([length if i == axis else s for i, s in enumerate(value.shape)])


def resize_calls(
    graph: ModelGraph, placements: Placements, axes: AxesClass, length_of: LengthOf, whole: Collection[fx.Node] = ()
) -> None:
    """Resize sizes in call arguments, then the fake values of changed and new nodes and of readers of changed shapes.
    Deep models have many classes, each of which touches a small part of the graph."""
    for node, axis in axes.members:
        if node.target in _NAME_SIZES:
            sizes = list(cast("list[int]", node.args[1]))
            for axis, size in enumerate(sizes):
                if size != -1 and placements.find(node, axis) is axes:
                    sizes[axis] = length_of((node, axis))
            node.update_arg(1, sizes)
        elif node.target is aten.slice.Tensor and axis == node.args[1] and node not in whole:
            resize_slice(node, length_of((node, axis)))
    _refresh(graph, {node for node, _ in axes.members})


def _refresh(graph: ModelGraph, changed: set[fx.Node]) -> None:
    for node in graph.graph.nodes:
        if node.op != "call_function":
            continue
        known = node.meta.get("val")
        if known is None or node in changed or any(operand in changed for operand in node.all_input_nodes):
            node.meta["val"] = graph.fakes.of(node)
            if known is None or not same_value(known, node.meta["val"]):
                changed.add(node)
