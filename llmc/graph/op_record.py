"""The record of an llmc:: op: written once in the op's file, and read by argument name.

This module does not import llmc.ops. Importing llmc.ops fills `RECORDS`.
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

# The symbols of cost expressions; see graph/cost.py.
T, L, R, C, A = sympy.symbols("T L R C A", integer=True, nonnegative=True)


@dataclass(frozen=True)
class OpCall:
    """One call of an op as checks and costs see it: arguments and result by name, tensors as their fake values.

    symbols: maps size symbols of the fake tensors to those of costs; empty where no cost is computed.
    """

    arguments: Mapping[str, Any]
    result: Any
    symbols: Mapping[sympy.Symbol, sympy.Symbol]

    def shape(self, name: str) -> list[Any]:
        """The shape of a tensor argument; empty if the argument is not given."""
        value = self.arguments[name]
        return list(value.shape) if isinstance(value, Tensor) else []

    def sizes(self, name: str) -> tuple[sympy.Expr, ...]:
        """The shape in the symbols of a step."""
        return tuple(self.size(s) for s in self.shape(name))

    def size(self, size: int | torch.SymInt) -> sympy.Expr:
        """Return a size in the symbols of a step."""
        return sympy.Integer(size) if isinstance(size, int) else size.node.expr.xreplace(self.symbols)

    def elements(self) -> sympy.Expr:
        """Number of elements of the first result; 0 if the op has no result."""
        first = self.result[0] if isinstance(self.result, tuple | list) else self.result
        return product(self.size(s) for s in first.shape) if isinstance(first, Tensor) else sympy.Integer(0)


def product(sizes: Any) -> sympy.Expr:
    """The product of sizes that `OpCall.sizes` returned."""
    return math.prod(sizes, start=sympy.Integer(1))


def visible_to(arguments: Mapping[str, Any]) -> Visible:
    """The keys that a query of an attention op sees."""
    keeps = arguments.get("keeps")
    if keeps is not None:
        return CachePolicy.from_text(keeps).visible
    return Visible(arguments.get("window"), arguments.get("chunk"), arguments.get("pinned") or 0)


class Part(Enum):
    """An operand of a product that the product's kernel computes itself, so that its value is never stored.

    STORAGE decodes a weight from its stored form. ARRIVAL prepares x, such as a norm or a rounding.
    """

    STORAGE = "storage"
    ARRIVAL = "arrival"


@dataclass(frozen=True)
class OpRecord:
    """One llmc:: op. `overload` is what graphs call; `reference` is the eager oracle of every kernel.

    stages: stages whose graphs may contain the op; empty for ops that only lowering or executors call. rows: arguments
    whose row i alone determines row i of the result, given the operands shared by all rows; empty for an op that mixes
    or creates rows. table: the argument from which a call reads one row per row of the result. share: the fraction of
    its weight that a call reads; None for all of it. flops: the operations of one call, an expression in the symbols of
    a step. check: returns the problem with a call's shapes, or None. part: the part of a product that the op computes.
    takes: for a product or lookup, the kind of part that each argument may be. axes: the rule that names axes
    (graph/axes.py); None if each rank needs all of them. least_part: for a call whose last axis ranks may split, the
    number of consecutive elements that stay together; None for 1. across: for a collective, computes the results of all
    ranks from their first arguments; the other arguments are equal on all ranks. linear_in: the argument in which the
    op is linear. fallback: the contract that a build may waive, which makes the op legal in later stages.
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
    least_part: Callable[[OpCall], int] | None
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
        """Whether it multiplies x with a weight, in any stored form of either."""
        return "x" in self.takes

    @property
    def is_of_experts(self) -> bool:
        """Whether it multiplies each token with a part of the weight only: the experts that the token is routed to."""
        return self.is_product and self.share is not None

    @property
    def is_lookup(self) -> bool:
        """Whether it looks up rows of a weight, in any stored form."""
        return "weight" in self.takes and not self.is_product


# By overload, filled by llmc.ops.registry.op as the ops' files are imported.
RECORDS: dict[OpOverload, OpRecord] = {}


def record_of(node: fx.Node) -> OpRecord | None:
    """The record of the op that a node calls; None for aten ops and for nodes that call nothing."""
    return RECORDS.get(node.target) if isinstance(node.target, OpOverload) else None


def op_call(node: fx.Node, symbols: Mapping[sympy.Symbol, sympy.Symbol] | None = None) -> OpCall:
    """A node's call, its operands replaced by their fake values."""
    values = {name: _value(argument) for name, argument in call_arguments(node).items()}
    return OpCall(values, node.meta.get("val"), symbols or {})


def ops_at(stage: Stage) -> frozenset[OpOverload]:
    """The llmc:: ops that a graph may hold at a stage."""
    return frozenset(overload for overload, record in RECORDS.items() if stage in record.stages)


def ops_with(argument: str) -> tuple[OpOverload, ...]:
    """The llmc:: ops that have an argument of this name."""
    return tuple(
        record for record in RECORDS if any(parameter.name == argument for parameter in record._schema.arguments)
    )


def _value(argument: Any) -> Any:
    return argument.meta.get("val") if isinstance(argument, fx.Node) else argument
