"""The loop IR: what a group of pointwise, broadcast and reduction work computes, before it is printed in a language.

    for row in rows:                    # in parallel
      for i in dims[:-1]:
        for column in dims[-1]:         # vectorized; once for each phase
          load → fp32 (or int, bool) arithmetic → row reductions → store with rounding

A statement's operands are indices of earlier statements. Statements that depend on a reduction over the columns run in
a later sweep over them (a phase), which loads its inputs again. All stores run in the last phase, so a store may be in
place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from llmc.graph.pointwise import Kind
from llmc.program import RowCount


@dataclass(frozen=True)
class Parameter:
    """A pointer argument: its elements' dtype (a safetensors name), and elements from one row, dims… to the next.

    written: the loop stores to it; it may read from it too, but then only at the place where it writes.
    """

    dtype: str
    strides: tuple[int, ...]
    written: bool


@dataclass(frozen=True)
class Load:
    """The element of a parameter at the loop's place."""

    parameter: int
    kind: Kind


@dataclass(frozen=True)
class Constant:
    """A number that the loop's code contains, as a value of `kind`."""

    value: float | int | bool
    kind: Kind


@dataclass(frozen=True)
class Apply:
    """A function from graph/pointwise.py's FUNCTIONS of earlier values; `kind` is the result's."""

    function: str
    operands: tuple[int, ...]
    kind: Kind


@dataclass(frozen=True)
class Reduce:
    """sum, mean, max or min of an earlier value over the columns."""

    reduction: str
    operand: int
    kind: Kind = Kind.FLOAT


@dataclass(frozen=True)
class Store:
    """Round an earlier value to the parameter's dtype and write it."""

    parameter: int
    operand: int


Statement = Load | Constant | Apply | Reduce | Store

REDUCTIONS = frozenset({"sum", "mean", "max", "min"})


@dataclass(frozen=True)
class Loop:
    """A loop nest. `dims` has at least one entry, the columns."""

    rows: RowCount
    dims: tuple[int, ...]
    parameters: tuple[Parameter, ...]
    statements: tuple[Statement, ...]

    @cached_property
    def per_column(self) -> tuple[bool, ...]:
        """Return for each statement whether its value differs from column to column."""
        varies: list[bool] = []
        for s in self.statements:
            if isinstance(s, Load | Store):
                varies.append(self.parameters[s.parameter].strides[-1] != 0)
            else:
                varies.append(isinstance(s, Apply) and any(varies[o] for o in s.operands))
        return tuple(varies)

    @cached_property
    def phases(self) -> tuple[int, ...]:
        """Return for each statement the sweep over the columns in which it can first run; all stores are in the
        last."""
        phases: list[int] = []
        for s in self.statements:
            phases.append(max((phases[o] for o in operands(s)), default=0) + isinstance(s, Reduce))
        last = max((p for p, s in zip(phases, self.statements, strict=True) if not isinstance(s, Store)), default=0)
        return tuple(last if isinstance(s, Store) else p for p, s in zip(phases, self.statements, strict=True))

    def needed(self, roots: Sequence[int]) -> tuple[int, ...]:
        """The statements, in order, that must run for `roots`, down to reductions and loads; roots included."""
        seen: set[int] = set()
        pending = list(roots)
        while pending:
            index = pending.pop()
            if index not in seen:
                seen.add(index)
                if not isinstance(self.statements[index], Reduce) or index in roots:
                    pending.extend(operands(self.statements[index]))
        return tuple(sorted(seen))


def operands(statement: Statement) -> tuple[int, ...]:
    """The earlier statements whose values it uses."""
    if isinstance(statement, Apply):
        return statement.operands
    return (statement.operand,) if isinstance(statement, Reduce | Store) else ()


def collapse(loop: Loop) -> Loop:
    """Join neighbouring axes of a loop that every parameter walks as one axis, and return the joined loop.

    The columns of a loop with reductions stay as they are; so does a column axis that a parameter broadcasts over.
    """
    dims = list(loop.dims)
    strides = [list(p.strides) for p in loop.parameters]
    reduces = any(isinstance(s, Reduce) for s in loop.statements)
    for axis in reversed(range(len(dims) - 1)):
        if reduces and axis + 1 == len(dims) - 1 and dims[axis] != 1:
            continue
        if dims[axis + 1] == 1 and dims[axis] != 1:
            del dims[axis + 1]
            for s in strides:
                del s[axis + 2]
        elif all(s[axis + 1] == s[axis + 2] * dims[axis + 1] or dims[axis] == 1 for s in strides):
            dims[axis : axis + 2] = [dims[axis] * dims[axis + 1]]
            for s in strides:
                del s[axis + 1]
    parameters = tuple(Parameter(p.dtype, tuple(s), p.written) for p, s in zip(loop.parameters, strides, strict=True))
    return Loop(loop.rows, tuple(dims), parameters, loop.statements)
