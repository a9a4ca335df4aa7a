"""Products with the experts that tokens were sent to, those of one routing together."""

from collections.abc import Iterator
from itertools import groupby

import torch
from torch import Tensor, fx

from llmc.graph.call_arguments import call_arguments
from llmc.graph.model_graph import ModelGraph
from llmc.graph.op_record import Part
from llmc.graph.product_parts import is_of_experts, part_of, stored_rows
from llmc.graph.refusal import Refusal

_llmc = torch.ops.llmc
# Products of experts, in order.
Mixture = tuple[fx.Node, ...]


def mixtures(graph: ModelGraph) -> Iterator[tuple[fx.Node, Mixture]]:
    """Yield the selections of experts with their products, in the order of the graph."""
    products = [node for node in graph.graph.nodes if is_of_experts(node)]
    for index, members in groupby(products, key=lambda node: call_arguments(node)["index"]):
        yield index, tuple(members)


def divided_by_expert(graph: ModelGraph) -> frozenset[fx.Node]:
    """The weights of all mixtures whose experts can be divided over ranks."""
    divisible = [mixture for _, mixture in mixtures(graph) if not_divisible(graph, mixture) is None]
    return frozenset(weight for mixture in divisible for product in mixture for weight in weights_of(graph, product))


def weights_of(graph: ModelGraph, product: fx.Node) -> list[fx.Node]:
    """The placeholders with a run of rows for each expert: a dense weight, or the parts of a stored one; and a bias."""
    arguments = call_arguments(product)
    weight, bias = arguments["weight"], arguments["bias"]
    parts = [weight] if weight.name in graph.weights else stored_rows(weight).values()
    return [part for part in (*parts, bias) if part is not None]


def not_divisible(graph: ModelGraph, mixture: Mixture) -> Refusal | None:
    """Return why ranks cannot each have some of a mixture's experts."""
    for product in mixture:
        weight = call_arguments(product)["weight"]
        if weight.name not in graph.weights and part_of(weight) is not Part.STORAGE:
            return Refusal(f"its weight comes from {weight.name}, which cannot be divided among ranks", product)
        for part in weights_of(graph, product):
            if len(part.users) > 1:
                return Refusal(f"{part.name} is also used elsewhere", product)
    for node in between(mixture):
        value = node.meta["val"]
        if not isinstance(value, Tensor) or value.shape[:2] != mixture[0].meta["val"].shape[:2]:
            return Refusal(f"{node.name} does not work on each slot by itself", node)
    return None


def between(mixture: Mixture) -> list[fx.Node]:
    """Return all nodes that read results of the products, up to the sums."""
    nodes: dict[fx.Node, None] = {}
    left = list(mixture)
    while left:
        for user in left.pop().users:
            if user.target is not _llmc.sum_experts.default and user not in nodes:
                nodes[user] = None
                left.append(user)
    return list(nodes)
