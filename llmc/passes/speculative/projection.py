"""How a step's logits come from hidden states."""

from dataclasses import dataclass

import torch
from torch import fx

from llmc.errors import PassError
from llmc.graph.call_arguments import call_arguments
from llmc.graph.model_graph import ModelGraph
from llmc.graph.op_record import Part
from llmc.graph.pointwise import POINTWISE
from llmc.graph.product_parts import part_of
from llmc.graph.step_inputs import has_selected_logits

GATHER = torch.ops.llmc.all_gather.default


@dataclass(frozen=True)
class Projection:
    """From hidden states to logits. arrival: how h comes to the product, if not as it is. after: what becomes of the
    product's result, in order; where ranks have parts of the output matrix, they gather their logits."""

    product: fx.Node
    hidden: fx.Node
    arrival: fx.Node | None
    after: tuple[fx.Node, ...]

    @property
    def weight(self) -> fx.Node:
        """The output matrix."""
        node: fx.Node = call_arguments(self.product)["weight"]
        return node


def projection_of(graph: ModelGraph) -> Projection:
    """The output projection of the requested rows. Raises PassError if there is none."""
    node, after = graph.logits(), list[fx.Node]()
    while (node.target in POINTWISE and len(node.all_input_nodes) == 1) or node.target is GATHER:
        after.append(node)
        node = node.all_input_nodes[0]
    if node.target is not torch.ops.llmc.lm_head.default or not has_selected_logits(graph):
        raise PassError(
            f"draft heads need an output projection for the rows asked for; the logits come from {node.target}",
            at=node.name,
            fix="build without speculative, or let make_lm_head and select_logit_rows run",
        )
    x: fx.Node = call_arguments(node)["x"]
    arrival = x if part_of(x) is Part.ARRIVAL else None
    hidden = x if arrival is None else call_arguments(arrival)["x"]
    return Projection(node, hidden, arrival, tuple(reversed(after)))
