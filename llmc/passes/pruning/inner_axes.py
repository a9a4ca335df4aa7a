"""Find what can be taken out: classes of axes that lie between products, as those that ranks cut.

    down(silu(gate(x)) * up(x))          the rows of gate and up, the columns of down: channels
    o(attention(q(x), k(x), v(x)))       a KV head's rows of k and v, the rows of q and the columns of o that go with it
A class can be pruned if only products make it and sum over it, and everything between works on each part by itself. The
channels of the residual stream, which lookups make, are none, and neither is the vocabulary.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from llmc.formats.pruning import Kind
from llmc.graph.call_arguments import call_arguments
from llmc.graph.model_graph import ModelGraph
from llmc.graph.op_record import Part
from llmc.graph.product_parts import is_of_experts, is_product, part_of
from llmc.graph.refusal import Refusal
from llmc.graph.render import op_name
from llmc.graph.weights import stored_names
from llmc.passes.parallel.propagate_placements import AxesClass, NodeAxis, Placements
from llmc.passes.parallel.roles import Role, roles

_HEAD = torch.ops.llmc.lm_head.default
_ATTENTION = torch.ops.llmc.attention.default


@dataclass(frozen=True)
class InnerAxes:
    """A class of axes that may lose elements. kind: heads where an attention is between. unit: elements of the class
    that belong together, such as those of a KV head and of its query heads. products: those that sum over it."""

    axes: AxesClass
    kind: Kind
    unit: int
    products: tuple[fx.Node, ...]
    weights: tuple[NodeAxis, ...]
    modules: tuple[str, ...]

    @property
    def count(self) -> int:
        """Number of units."""
        return self.axes.size // self.unit

    @property
    def module(self) -> str:
        """Its name: the checkpoint's name of the product that sums over it."""
        return self.modules[-1]


def inner_axes(graph: ModelGraph, placements: Placements, kind: Kind) -> Iterator[InnerAxes | Refusal]:
    """Yield every class of a kind in the order of the graph, or the reason why it stays."""
    touching: dict[AxesClass, list[Role]] = {}
    for role in roles(graph, placements):
        for axes in role.classes():
            touching.setdefault(axes, []).append(role)
    for axes, members in touching.items():
        weights = tuple((node, axis) for node, axis in axes.members if node.name in graph.weights)
        readers = [role.node for role in members if _reads(role, axes)]
        makers = [role.node for role in members if role.node not in readers and _is_product(role.node)]
        if not readers or not makers or any(_is_looked_up(node) for node, _ in weights):
            continue
        if kind == ("heads" if any(role.node.target is _ATTENTION for role in members) else "channels"):
            attentions = [role.node for role in members if role.node.target is _ATTENTION]
            unit = math.lcm(
                *(scale.per for scale in axes.members.values()), *(_group(axes, node) for node in attentions)
            )
            yield _refusal(axes, members) or _found(graph, axes, kind, unit, tuple(readers), weights)


def _found(
    graph: ModelGraph,
    axes: AxesClass,
    kind: Kind,
    unit: int,
    readers: tuple[fx.Node, ...],
    weights: tuple[NodeAxis, ...],
) -> InnerAxes:
    summed = {call_arguments(node)["weight"] for node in readers}
    ordered = sorted((node for node, _ in weights), key=summed.__contains__)
    names = [name for node in ordered for name in stored_names(graph.weights[node.name])[:1]]
    modules = dict.fromkeys(name.removesuffix(".weight") for name in names if not name.endswith(".bias"))
    return InnerAxes(axes, kind, unit, readers, weights, tuple(modules))


def _group(axes: AxesClass, attention: fx.Node) -> int:
    """Elements for each KV head. A single one is in no class, and goes with all of its query heads or not at all."""
    return axes.size // int(call_arguments(attention)["k"].meta["val"].shape[1])


def _reads(role: Role, class_: AxesClass) -> bool:
    """Whether a product multiplies with the class's elements."""
    return _is_product(role.node) and (class_ in role.sums or any(class_ is axes for _, axes in role.gathers))


def _is_product(node: fx.Node) -> bool:
    """Whether it multiplies into anything but logits."""
    return is_product(node) and node.target is not _HEAD


def _is_looked_up(weight: fx.Node) -> bool:
    """Whether a matrix is a table of tokens or positions, or multiplied into logits."""
    readers = [reader for user in weight.users for reader in (user.users if part_of(user) is Part.STORAGE else (user,))]
    return weight.meta["val"].dim() > 1 and not any(map(_is_product, readers))


def _refusal(class_: AxesClass, members: list[Role]) -> Refusal | None:
    for node, _ in class_.members:
        if part_of(node) is Part.STORAGE:
            return Refusal(f"{node.name} is stored as codes: channels and heads are taken out of dense weights", node)
    for role in members:
        node, seen = role.node, f"{role.node.name} ({_call(role.node)})"
        if class_ in role.squares:
            return Refusal(f"{seen} divides by the mean square of all {class_.size} channels", node)
        if is_of_experts(node):
            return Refusal(f"{seen} multiplies the channels of each token's own experts", node)
        if class_ in role.takes or any(axes is class_ for _, axes in role.gathers):
            return Refusal(f"{seen} needs all {class_.size} elements of the axis at once", node)
    return None


def _call(node: fx.Node) -> str:
    return op_name(node.target) if node.op == "call_function" else node.op
