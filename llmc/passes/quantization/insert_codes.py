"""Put codes in the place of a weight, and rounded tokens in the place of a product's input, as nodes of the graph.

linear(x, w)  ->  linear(x, dequantize(w_codes, w_scales, w_zeros))
linear(x, w)  ->  linear(round_tokens(x), w)
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, fx

from llmc.formats.code_format import CODE_PARTS
from llmc.graph.model_graph import ModelGraph
from llmc.graph.weights import Constant, Recipe, stored_names
from llmc.passes.quantization.round_weight import RoundedWeight
from llmc.passes.recorded_graph import new_weight

_llmc = torch.ops.llmc


def insert_weight(
    graph: ModelGraph, weights: Sequence[fx.Node], readers: Sequence[fx.Node], rounded: RoundedWeight
) -> None:
    """Make readers read codes. weights: the placeholders that they read now, of one tensor."""
    parts = rounded.parts()
    names = stored_names(graph.weights[weights[0].name])
    recipes = {name: Constant(part, names) for name, part in parts.items()}
    insert_recipes(graph, weights, readers, recipes, parts, rounded.format)


def insert_recipes(
    graph: ModelGraph,
    weights: Sequence[fx.Node],
    readers: Sequence[fx.Node],
    recipes: dict[str, Recipe] | dict[str, Constant],
    like: Mapping[str, Tensor],
    format: str,
) -> None:
    """Make readers read codes with these recipes, by part (CODE_PARTS). like: each part's shape and dtype."""
    first = weights[0].meta["val"]
    parts: dict[str, fx.Node | None] = dict.fromkeys(CODE_PARTS)
    for name, part in like.items():
        value = first.new_empty(part.shape, dtype=part.dtype)
        parts[name] = node = new_weight(graph, f"{weights[0].name}_{name}", recipes[name], value)
        node.meta["stack_trace"] = weights[0].meta.get("stack_trace")
    codes, scales, zeros, *more = parts.values()
    while more and more[-1] is None:
        more.pop()
    arguments = (codes, scales, zeros, format, graph.info.dtype, *more)
    with graph.graph.inserting_before(min(readers)):
        values = graph.graph.call_function(_llmc.dequantize.default, arguments)
    for weight in weights:
        for reader in readers:
            reader.replace_input_with(weight, values)


def insert_tokens(
    graph: ModelGraph, product: fx.Node, x: fx.Node, scale: Tensor | None, format: str, group: int | None = None
) -> fx.Node:
    """Round a product's input, and return the node that the product then reads. scale: [1] if it is static. group:
    channels that share a scale; None for all."""
    static = None
    if scale is not None:
        static = new_weight(graph, f"{x.name}_scale", Constant(scale), x.meta["val"].new_empty(1, dtype=torch.float32))
    with graph.graph.inserting_before(product):
        arguments = (x, static, format, x.meta["val"].dtype, *(() if group is None else (group,)))
        return graph.graph.call_function(_llmc.round_tokens.default, arguments)
