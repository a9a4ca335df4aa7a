"""Operations of a canonical graph that are still written in aten ops; one node represents each operation."""

from collections.abc import Callable
from operator import getitem

import torch
from torch import fx

from llmc.graph.call_arguments import call_arguments
from llmc.graph.model_graph import ModelGraph
from llmc.passes.uses import DATA_MOVEMENT
from llmc.report.coverage.rule import calls, calls_to

aten, ops = torch.ops.aten, torch.ops.llmc

_ATTENTION = frozenset({aten.softmax.int, aten._softmax.default, aten._safe_softmax.default})
_SDPA = aten.scaled_dot_product_attention.default
_PRODUCTS = frozenset({aten.linear.default, aten.addmm.default, aten.mm.default, aten.matmul.default, aten.bmm.default})
ACTIVATIONS = frozenset({aten.silu.default, aten.gelu.default, aten.relu.default, aten.sigmoid.default})


def attentions(graph: ModelGraph) -> list[fx.Node]:
    """SDPA, and softmaxes whose result weighs something in a product: not those of a router."""
    return [
        n
        for n in calls(graph)
        if n.target is _SDPA or (n.target in _ATTENTION and any(u.target in _PRODUCTS for u in _readers(n)))
    ]


def _readers(node: fx.Node) -> list[fx.Node]:
    """The users of a value, also of its views and casts."""
    readers: list[fx.Node] = []
    for user in node.users:
        readers += _readers(user) if user.target in DATA_MOVEMENT else [user]
    return readers


def source(node: fx.Node) -> fx.Node:
    """The node that a value views or casts."""
    while node.target in DATA_MOVEMENT and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _mean_squares(graph: ModelGraph, *, centered: bool) -> list[fx.Node]:
    """Means over the last axis of squares. centered: whether the squares are those of differences to a mean, as in
    LayerNorm."""
    matches = []
    for node in calls_to(graph, aten.mean.dim):
        square = source(node.all_input_nodes[0])
        operands = square.all_input_nodes
        is_power = square.target is aten.pow.Tensor_Scalar and square.args[1] == 2
        is_product = square.target is aten.mul.Tensor and len(operands) == 1
        if is_power or is_product:
            base = source(operands[0])
            is_centered = base.target is aten.sub.Tensor and any(
                source(n).target is aten.mean.dim for n in base.all_input_nodes
            )
            if is_centered is centered:
                matches.append(node)
    return matches


def rms_norms(graph: ModelGraph) -> list[fx.Node]:
    """RMSNorms that are not one node."""
    written_out = _mean_squares(graph, centered=False)
    return [*written_out, *calls_to(graph, aten.rms_norm.default), *_weighted_outside(graph, ops.rms_norm.default)]


def layer_norms(graph: ModelGraph) -> list[fx.Node]:
    """LayerNorms that are not one node."""
    known = calls_to(graph, aten.layer_norm.default, aten.native_layer_norm.default, aten.var.correction)
    return [*_mean_squares(graph, centered=True), *known, *_weighted_outside(graph, ops.layer_norm.default)]


def _weighted_outside(graph: ModelGraph, norm: object) -> list[fx.Node]:
    """Products of a norm that has no weight with one: half of the norm is fused."""
    weights = set(graph.weight_nodes())
    matches = []
    for node in calls_to(graph, aten.mul.Tensor):
        operands = [source(a) for a in node.all_input_nodes]
        norms = [a for a in operands if a.target is norm]
        vectors = [a for a in operands if a in weights and a.meta["val"].dim() == 1]
        if norms and vectors and call_arguments(norms[0])["weight"] is None:
            matches.append(node)
    return matches


def whole_norms(norm: object) -> Callable[[ModelGraph], int]:
    """Return a function that counts the norms of a graph that have all of their weight."""
    return lambda graph: len(calls_to(graph, norm)) - len(_weighted_outside(graph, norm))


def rotations(graph: ModelGraph) -> list[fx.Node]:
    """Products with the cosines of rotary angles outside a rope, and cosines that were not recognised."""
    angles = calls_to(graph, ops.rope_angles.default)
    halves = [u for n in angles for u in n.users if u.target is getitem and u.args[1] == 0]
    cosines = calls_to(graph, aten.cos.default)
    return [r for h in (*halves, *cosines) for r in _angle_products(h)] + [c for c in cosines if not _angle_products(c)]


def _angle_products(node: fx.Node) -> list[fx.Node]:
    products: list[fx.Node] = []
    for user in node.users:
        if user.target is aten.mul.Tensor and not is_scaling(user):
            products.append(user)
        elif user.target in DATA_MOVEMENT or user.target is aten.cat.default or is_scaling(user):
            products += _angle_products(user)
    return products


def is_scaling(node: fx.Node) -> bool:
    """Whether it multiplies a tensor by a number."""
    return node.target is aten.mul.Tensor and len(node.all_input_nodes) == 1


def weight_products(graph: ModelGraph) -> list[fx.Node]:
    """Products of the step's values with a weight, except those of experts."""
    return [n for n, weight in _products_with_weights(graph) if weight.meta["val"].dim() != 3]


def expert_products(graph: ModelGraph) -> list[fx.Node]:
    """Products with weights stored in one tensor [experts, …]."""
    return [n for n, weight in _products_with_weights(graph) if weight.meta["val"].dim() == 3]


def _products_with_weights(graph: ModelGraph) -> list[tuple[fx.Node, fx.Node]]:
    """Return each product with its weight."""
    weights = set(graph.weight_nodes())
    products = [n for n in calls(graph) if n.target in _PRODUCTS]
    weighted = ((n, next((s for a in n.all_input_nodes if (s := source(a)) in weights), None)) for n in products)
    return [(n, weight) for n, weight in weighted if weight is not None]


def gates(graph: ModelGraph) -> list[fx.Node]:
    """Products of an activation with another tensor of its shape."""
    products = [n for n in calls_to(graph, aten.mul.Tensor) if len(n.all_input_nodes) == 2]
    return [n for n in products if any(_opens(*order) for order in (n.all_input_nodes, n.all_input_nodes[::-1]))]


def _opens(factor: fx.Node, other: fx.Node) -> bool:
    """Whether an activation is a gate for another tensor, of the same shape."""
    is_gate = factor.target in ACTIVATIONS and other not in factor.all_input_nodes and other.op != "placeholder"
    return is_gate and list(factor.meta["val"].shape) == list(other.meta["val"].shape)
