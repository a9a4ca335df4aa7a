"""What everybody needs to know of an llmc:: op, in one record: written in the op's file, read by name of argument.

Stands below llmc.ops and knows no op: importing llmc.ops fills `RECORDS`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from llmc.graph.axes import AxisRule
from llmc.graph.call_arguments import call_arguments
from llmc.graph.stage import Stage
from llmc.program import CachePolicy, Visible

# What costs are expressions of; see graph/cost.py.
T, L, R, C, A = sympy.symbols("T L R C A", integer=True, nonnegative=True)


@dataclass(frozen=True)
class OpCall:
    """One call of an op as checks and costs see it: arguments and result by name, tensors as their fake values.

    symbols: what the fake tensors' own size symbols stand for in a cost; empty where no cost is asked for.
    """

    arguments: Mapping[str, Any]
    result: Any
    symbols: Mapping[sympy.Symbol, sympy.Symbol]

    def shape(self, name: str) -> list[Any]:
        """Of a tensor argument; empty for one that is not given."""
        value = self.arguments[name]
        return list(value.shape) if isinstance(value, Tensor) else []

    def sizes(self, name: str) -> tuple[sympy.Expr, ...]:
        """The shape in the symbols of a step."""
        return tuple(self.size(s) for s in self.shape(name))

    def size(self, size: int | torch.SymInt) -> sympy.Expr:
        """One size in the symbols of a step."""
        return sympy.Integer(size) if isinstance(size, int) else size.node.expr.xreplace(self.symbols)

    def elements(self) -> sympy.Expr:
        """Of the first result; 0 for an op that has none."""
        first = self.result[0] if isinstance(self.result, tuple | list) else self.result
        return product(self.size(s) for s in first.shape) if isinstance(first, Tensor) else sympy.Integer(0)


def product(sizes: Any) -> sympy.Expr:
    """Of sizes as `OpCall.sizes` gives them."""
    return math.prod(sizes, start=sympy.Integer(1))


def visible_to(arguments: Mapping[str, Any]) -> Visible:
    """The keys that a query of an attention sees, or of what reads a cache."""
    keeps = arguments.get("keeps")
    if keeps is not None:
        return CachePolicy.from_text(keeps).visible
    return Visible(arguments.get("window"), arguments.get("chunk"), arguments.get("pinned") or 0)


class Part(Enum):
    """What stands right before a product and is computed by the product's kernel, so that its value is never written.

    STORAGE yields a weight from how it is stored. ARRIVAL yields x from how it comes to the product.
    """

    STORAGE = "storage"
    ARRIVAL = "arrival"


@dataclass(frozen=True)
class OpRecord:
    """One llmc:: op. `overload` is what graphs call; `reference` is the eager oracle of every kernel.

    stages: where graphs may hold it; none for ops that only lowering or executors call. rows: arguments whose row i
    alone makes row i of the result, beside operands that are the same for all rows; empty for an op that mixes rows or
    makes them. table: the argument of which a call reads only as many rows as its result has. share: what part of its
    weight a call reads; None for all of it. flops: of one call, an expression in the symbols of a step. check: what is
    wrong with a call's shapes, or None. part: of a product that the op is; takes: of a product or lookup, the arguments
    before which a part may stand, and which. axes: which axes belong together (graph/axes.py); None where each rank
    needs all of them. across: of a collective, what every rank gets, given the first argument of each; the others are
    the same for all. linear_in: the argument of which the result of a sum is the sum of the results. fallback: the
    contract whose absence a build may allow, so that the op is legal in later stages too.
    """

    name: str
    overload: OpOverload
    reference: Callable[..., Any]
    stages: frozenset[Stage]
    rows: tuple[str, ...]
    table: str | None
    share: Callable[[OpCall], sympy.Expr] | None
    flops: Callable[[OpCall], sympy.Expr]
    check: Callable[[OpCall], str | None] | None
    part: Part | None
    takes: Mapping[str, Part]
    axes: AxisRule | None
    across: Callable[..., Any] | None
    linear_in: str | None
    fallback: str | None

    @property
    def arguments(self) -> tuple[str, ...]:
        """Their names, in order."""
        return tuple(argument.name for argument in self.overload._schema.arguments)

    @property
    def writes(self) -> tuple[str, ...]:
        """The arguments that a call changes in place."""
        arguments = self.overload._schema.arguments
        return tuple(a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write)

    @property
    def is_product(self) -> bool:
        """Whether it multiplies x with a weight, however both come to it."""
        return "x" in self.takes

    @property
    def is_of_experts(self) -> bool:
        """Whether it multiplies each token with a part of a weight alone: those of the experts that it was sent to."""
        return self.is_product and self.share is not None

    @property
    def is_lookup(self) -> bool:
        """Whether it looks up rows of a weight, however that is stored."""
        return "weight" in self.takes and not self.is_product


# By overload, filled by llmc.ops.registry.op as the ops' files are imported.
RECORDS: dict[OpOverload, OpRecord] = {}


def record_of(node: fx.Node) -> OpRecord | None:
    """The record of what a node calls; None for aten's ops and for nodes that call nothing."""
    return RECORDS.get(node.target) if isinstance(node.target, OpOverload) else None


def op_call(node: fx.Node, symbols: Mapping[sympy.Symbol, sympy.Symbol] | None = None) -> OpCall:
    """A node's call, its operands replaced by their fake values."""
    values = {name: _value(argument) for name, argument in call_arguments(node).items()}
    return OpCall(values, node.meta.get("val"), symbols or {})


def ops_at(stage: Stage) -> frozenset[OpOverload]:
    """The llmc:: ops that a graph may hold at a stage."""
    return frozenset(overload for overload, record in RECORDS.items() if stage in record.stages)


def _value(argument: Any) -> Any:
    return argument.meta.get("val") if isinstance(argument, fx.Node) else argument
