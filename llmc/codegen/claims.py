"""Which nodes a product's kernel computes on the way: how its weight is stored, how x arrives.

Such a node is claimed: no launch computes it, and whoever reads it reads what it reads. A part (graph/product_parts.py)
is claimed if its values are not rounded and all its readers are products; whether there is a kernel for the product
with its parts is the backend's to say. A norm may be claimed besides, where the backend's kernels take it in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from llmc.codegen.backend import Backend
from llmc.graph.model_graph import ModelGraph
from llmc.graph.product_parts import unrounded_parts
from llmc.graph.refusal import Refusal


@dataclass(frozen=True)
class Claims:
    """before: of each product what it claims, in graph order. refusals: why norms have launches of their own."""

    before: Mapping[fx.Node, tuple[fx.Node, ...]]
    refusals: tuple[Refusal, ...] = ()

    @property
    def nodes(self) -> frozenset[fx.Node]:
        """All that is claimed."""
        return frozenset(node for claimed in self.before.values() for node in claimed)

    def unit(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """A node with what it claims, in graph order."""
        return (*self.before.get(node, ()), node)


def find_claims(graph: ModelGraph, backend: Backend) -> Claims:
    """The claims of every product of a graph."""
    wanted = {product: tuple(unrounded_parts(product).values()) for product in graph.graph.nodes}
    readers: dict[fx.Node, set[fx.Node]] = {}
    for product, parts in wanted.items():
        for part in parts:
            readers.setdefault(part, set()).add(product)
    before: dict[fx.Node, tuple[fx.Node, ...]] = {}
    refusals: dict[Refusal, None] = {}
    for product, parts in wanted.items():
        claimed = [part for part in parts if set(part.users) == readers[part]]
        norm = backend.norm_before(product)
        if isinstance(norm, Refusal):
            refusals[norm] = None
        elif norm is not None:
            claimed.append(norm)
        if claimed:
            before[product] = tuple(sorted(claimed))
    return Claims(before, tuple(refusals))
