"""One product instead of two: in a step with drafts, the product of the draft heads also computes the logits.

    logits = lm_head(h, w), and lm_head(stack([h, …], 1), w)[:, 0] is the same

The second reads the whole output matrix anyway, and its first rows are those of the first. So in steps that need its
side outputs the first product is left out, and its result is copied from the second's. Bits stay the same on targets
whose products treat each row alike.
"""

from typing import Any

import torch
from torch import fx

from llmc.codegen.call import arguments_of
from llmc.codegen.side_views import SideViews
from llmc.graph.model_graph import ModelGraph
from llmc.graph.product_parts import unrounded_parts, x_of

_LM_HEAD = torch.ops.llmc.lm_head.default
_STACK = torch.ops.aten.stack.default


def find_stand_ins(graph: ModelGraph, sides: SideViews) -> dict[fx.Node, fx.Node]:
    """Map each product to the stacked product whose first rows equal it and which is computed for side outputs only."""
    products = graph.graph.find_nodes(op="call_function", target=_LM_HEAD)
    stand_ins: dict[fx.Node, fx.Node] = {}
    for stacked in products:
        first = _first_of_stack(x_of(stacked))
        if first is None or stacked not in sides.needed_by:
            continue
        for other in products:
            is_alike = x_of(other) is first and _but_x(other) == _but_x(stacked)
            if is_alike and other not in sides.needed_by:
                stand_ins[other] = stacked
    return stand_ins


def _first_of_stack(x: fx.Node) -> fx.Node | None:
    if x.target is not _STACK or arguments_of(x)["dim"] != 1:
        return None
    first: fx.Node = arguments_of(x)["tensors"][0]
    return first


def _but_x(product: fx.Node) -> dict[str, Any]:
    """The inputs of a product except x, with the form in which x arrives."""
    rest = {name: value for name, value in arguments_of(product).items() if name != "x"}
    arrival = unrounded_parts(product).get("x")
    if arrival is None:
        return rest
    return rest | {"arrival": {n: v for n, v in arguments_of(arrival).items() if n != "x"} | {"op": arrival.target}}
