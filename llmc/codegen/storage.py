"""Which row of a backend's table of storages a product takes: by the op that yields its weight, None for a dense one.

A backend's rows define how its kernels read a weight, for every product, and through which arrivals x may come.
"""

from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

from torch import fx

from llmc.codegen.call import Call
from llmc.graph.product_parts import unrounded_parts
from llmc.graph.refusal import Refusal
from llmc.graph.render import op_name


class Storage(Protocol):
    """A row of such a table."""

    @property
    def arrivals(self) -> frozenset[Any]:
        """The ops that may yield x."""


S = TypeVar("S", bound=Storage)


def storage_of(table: Mapping[Any, S], call: Call) -> S:
    """Return the row for a product or lookup that was not refused."""
    stored = call.within("weight")
    return table[None if stored is None else stored.op]


def storage_for(table: Mapping[Any, S], product: fx.Node, target: str) -> S | Refusal:
    """Return the row for a product or lookup, or a refusal if the target has no kernel for its weight and x."""
    parts = unrounded_parts(product)
    stored, arrived = parts.get("weight"), parts.get("x")
    storage = table.get(None if stored is None else stored.target)
    weights = "dense weights" if stored is None else f"weights that {op_name(stored.target)} yields"
    if storage is None:
        return Refusal(f"no kernel for {target} reads {weights}", product)
    if arrived is not None and arrived.target not in storage.arrivals:
        x = f"the result of {op_name(arrived.target)}"
        return Refusal(f"no kernel for {target} multiplies {x} by {weights}", product)
    return storage
