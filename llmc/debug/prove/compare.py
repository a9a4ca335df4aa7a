"""Whether two expressions are equal over the reals: shown by sympy, else compared in 50-digit arithmetic."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mpmath
import sympy

from llmc.debug.prove.elementary import Expression

_DIGITS, _POINTS = 50, 3
# Constants are doubles in models and in llmc, and some are written with ten digits (0.7978845608).
_TOLERANCE = mpmath.mpf(10) ** -9
# Operations above which sympy takes seconds to expand or to simplify, and is not asked to.
_EXPANDED, _SIMPLIFIED = 1000, 120


@dataclass(frozen=True)
class Counterexample:
    """Where two expressions differ: inputs that are not 0, and what each expression is there."""

    element: str
    inputs: Mapping[str, float]
    before: float
    after: float

    def __str__(self) -> str:
        at = ", ".join(f"{name} = {value:g}" for name, value in self.inputs.items()) or "all 0"
        return f"{self.element}: {self.before:.6g} becomes {self.after:.6g} at {at}"


@dataclass(frozen=True)
class Comparison:
    """How elements compare. proved, compared: how many were shown equal, and how many were found equal at points."""

    proved: int
    compared: int
    counterexample: Counterexample | None = None


def compare(pairs: Sequence[tuple[str, Expression, Expression]]) -> Comparison:
    """Each pair is (the element's name, before, after)."""
    undecided: dict[tuple[Expression, Expression], str] = {}
    for name, a, b in pairs:
        if a != b:
            undecided.setdefault((a, b), name)
    for (a, b), name in undecided.items():
        found = _difference(name, a, b)
        if found is not None:
            return Comparison(0, 0, found)
    equal: set[tuple[Expression, Expression]] = set()
    simplifies = True
    for pair in undecided:
        difference = pair[0] - pair[1]
        if sympy.count_ops(difference) < _EXPANDED:
            difference = sympy.expand(difference)
        if difference != 0 and simplifies and sympy.count_ops(difference) < _SIMPLIFIED:
            difference = sympy.simplify(difference)
            simplifies = difference == 0  # elements are alike: where one cannot be decided, the others cannot
        if difference == 0:
            equal.add(pair)
    compared = sum((a, b) in undecided and (a, b) not in equal for _, a, b in pairs)
    return Comparison(len(pairs) - compared, compared)


def _difference(name: str, before: Expression, after: Expression) -> Counterexample | None:
    symbols = sorted(before.free_symbols | after.free_symbols, key=str)
    values = sympy.lambdify(symbols, [before, after], "mpmath", cse=True)
    generator = random.Random(0)

    def differs(point: Mapping[Any, float]) -> tuple[Any, Any] | None:
        with mpmath.workdps(_DIGITS):
            try:
                a, b = values(*(mpmath.mpf(point[s]) for s in symbols))
                finite = mpmath.isfinite(a) and mpmath.isfinite(b)
            except (ZeroDivisionError, ValueError, OverflowError):
                return None
            return (a, b) if finite and abs(a - b) > _TOLERANCE * (1 + abs(a) + abs(b)) else None

    for _ in range(_POINTS):
        point = {s: generator.choice([-1, 1]) * generator.randrange(4, 40) / 16 for s in symbols}
        if differs(point) is not None:
            simple = _simplified(point, lambda p: differs(p) is not None)
            a, b = differs(simple) or (mpmath.nan, mpmath.nan)
            inputs = {str(s): value for s, value in simple.items() if value}
            return Counterexample(name, inputs, float(mpmath.re(a)), float(mpmath.re(b)))
    return None


def _simplified(point: dict[Any, float], still_differs: Any) -> dict[Any, float]:
    """The point with as many zeros, and else ones, as leave a difference."""
    for symbol in point:
        for value in (0.0, 1.0):
            if still_differs({**point, symbol: value}):
                point = {**point, symbol: value}
                break
    return point
