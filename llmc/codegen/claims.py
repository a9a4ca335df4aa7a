"""The nodes whose work a product's kernel does: those that decode its weight, and those that prepare x.

Such a node is claimed: no launch computes it, and its readers read its inputs instead. A part (graph/product_parts.py)
is claimed if its values are not rounded and all its readers are products; the backend decides whether there is a kernel
for the product with its parts. Further nodes are claimed if the backend's kernels compute them: a norm in the product
after it, a sum over ranks in the norm after it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from llmc.codegen.backend import Backend
from llmc.graph.model_graph import ModelGraph
from llmc.graph.product_parts import unrounded_parts
from llmc.graph.refusal import Refusal


@dataclass(frozen=True)
class Claims:
    """The nodes whose work another node's kernel does. before: the nodes that each node claims, in graph order.
    refusals: the reasons why nodes that might be claimed have their own launch."""

    before: Mapping[fx.Node, tuple[fx.Node, ...]]
    refusals: tuple[Refusal, ...] = ()

    @property
    def nodes(self) -> frozenset[fx.Node]:
        """All nodes that are claimed."""
        return frozenset(node for claimed in self.before.values() for node in claimed)

    def unit(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """A node and the nodes that it claims, in graph order."""
        return (*self.before.get(node, ()), node)


def find_claims(graph: ModelGraph, backend: Backend) -> Claims:
    wanted = {product: tuple(unrounded_parts(product).values()) for product in graph.graph.nodes}
    before: dict[fx.Node, tuple[fx.Node, ...]] = {}
    refusals: dict[Refusal, None] = {}
    for product, parts in wanted.items():
        claimed = [part for part in parts if all(part in wanted[user] for user in part.users)]
        more = backend.taken_in(product)
        if isinstance(more, Refusal):
            refusals[more] = None
        elif more is not None:
            claimed.append(more)
        if claimed:
            before[product] = tuple(sorted(claimed))
    return Claims(before, tuple(refusals))
