"""Whether two expressions are equal over the reals: shown by sympy, else compared in 50-digit arithmetic."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import mpmath
import sympy

from llmc.debug.prove.elementary import Expression, from_bool

_DIGITS = 50
# Number of points at which expressions are compared, and the limit of attempts to find points where both are numbers.
_POINTS, _TRIED = 3, 9
# Constants are doubles in models and in llmc, and some are written with ten digits (0.7978845608).
_TOLERANCE = mpmath.mpf(10) ** -9
# Larger values come from a division by a value that is 0 except in its last digits.
_LARGEST = mpmath.mpf(10) ** (_DIGITS - 20)
# Operations above which sympy takes seconds to expand or to simplify, and is not asked to.
_EXPANDED, _SIMPLIFIED = 1000, 120


@dataclass(frozen=True)
class Counterexample:
    """Where two expressions differ: inputs that are not 0, and what each expression is there.

    before, after: nan or inf if an expression has no value, complex if the value is not real. constants: the values of
    wildcards that are not tensors, as text.
    """

    element: str
    inputs: Mapping[str, float]
    before: complex
    after: complex
    constants: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        at = ", ".join(f"{name} = {value:g}" for name, value in self.inputs.items()) or "all 0"
        constants = with_constants(self.constants)
        return f"{self.element}: {self.before:.6g} becomes {self.after:.6g} at {at}{constants}"


@dataclass(frozen=True)
class Comparison:
    """How elements compare. proved, compared: how many were shown equal, and how many were found equal at points.
    problem: why others could not be compared."""

    proved: int
    compared: int
    counterexample: Counterexample | None = None
    problem: str | None = None


def with_constants(constants: Mapping[str, str]) -> str:
    """The end of a sentence that holds for these constants."""
    return ", with " + ", ".join(f"{name} = {value}" for name, value in constants.items()) if constants else ""


_Pair = tuple[Expression, Expression]


class Comparer:
    """Compares the elements of cases that are alike, each pair of expressions once."""

    def __init__(self) -> None:
        self._equal: set[_Pair] = set()
        self._alike: set[_Pair] = set()
        self._decides = True

    def compare(self, pairs: Sequence[tuple[str, Expression, Expression]]) -> Comparison:
        """Compare pairs of (the element's name, before, after)."""
        new: dict[_Pair, str] = {}
        for name, a, b in pairs:
            if a != b and (a, b) not in self._equal | self._alike:
                new.setdefault((a, b), name)
        evaluated: set[_Pair] = set()
        for pair, name in new.items():
            points = _Points(*pair)
            counterexample = points.counterexample(name)
            if counterexample is not None:
                return Comparison(0, 0, counterexample)
            if points.count:
                evaluated.add(pair)
        for pair, name in new.items():
            if self._is_shown_equal(*pair):
                self._equal.add(pair)
            elif pair in evaluated:
                self._alike.add(pair)
            else:
                return Comparison(0, 0, problem=f"{name} is a real number at none of {_TRIED + 1} points")
        compared = sum((a, b) in self._alike for _, a, b in pairs)
        return Comparison(len(pairs) - compared, compared)

    def _is_shown_equal(self, before: Expression, after: Expression) -> bool:
        """Return whether sympy shows that the elements are equal. Elements are alike, so one that cannot be decided,
        which takes long, ends the attempt."""
        difference = from_bool(before) - from_bool(after)
        if self._decides and sympy.count_ops(difference) < _EXPANDED:
            difference = sympy.expand(difference)
        if self._decides and difference != 0 and sympy.count_ops(difference) < _SIMPLIFIED:
            difference = sympy.simplify(difference)
        self._decides = self._decides and difference == 0
        return bool(difference == 0)


class _Points:
    """Two expressions at random points. count: number of points at which both are real numbers."""

    def __init__(self, before: Expression, after: Expression) -> None:
        self._symbols = sorted(before.free_symbols | after.free_symbols, key=str)
        self._functions = _function(self._symbols, before), _function(self._symbols, after)
        self.count = 0

    def counterexample(self, name: str) -> Counterexample | None:
        """A point at which they differ."""
        for point in self._tried():
            a, b = self._at(point)
            if _differ(a, b):
                are_numbers = _is_number(a) and _is_number(b)
                simple = _simplified(point, partial(self._still_differs, are_numbers))
                inputs = {str(s): value for s, value in simple.items() if value}
                before, after = map(_plain, self._at(simple))
                return Counterexample(name, inputs, before, after)
            self.count += _is_number(a) or a == b
        return None

    def _tried(self) -> Iterator[dict[Any, float]]:
        """Yield points with equal values, because comparisons may differ only there, then random ones until enough are
        numbers."""
        yield dict.fromkeys(self._symbols, 1.0)
        generator = random.Random(0)
        for tried in range(_TRIED):
            if self.count > _POINTS:
                return
            # Logarithms and roots are real where all are positive.
            signs = [-1, 1] if tried < _POINTS else [1]
            yield {s: generator.choice(signs) * generator.randrange(4, 40) / 16 for s in self._symbols}

    def _still_differs(self, are_numbers: bool, point: Mapping[Any, float]) -> bool:
        a, b = self._at(point)
        return _differ(a, b) and are_numbers == (_is_number(a) and _is_number(b))

    def _at(self, point: Mapping[Any, float]) -> tuple[Any, Any]:
        with mpmath.workdps(_DIGITS):
            values = [mpmath.mpf(point[s]) for s in self._symbols]
            before, after = (function(values) for function in self._functions)
        return before, after


def _function(symbols: Sequence[Any], expression: Expression) -> Callable[[Sequence[Any]], Any]:
    """The expression's value, given the symbols'; nan where it has none."""
    # lambdify has no name for a pole.
    evaluate = sympy.lambdify(symbols, expression.xreplace({sympy.zoo: sympy.nan}), "mpmath", cse=True)

    def value(values: Sequence[Any]) -> Any:
        try:
            number = mpmath.mpmathify(evaluate(*values))
        except (ZeroDivisionError, ValueError, OverflowError, TypeError):  # TypeError: complex numbers have no order
            return mpmath.nan
        imaginary = abs(mpmath.im(number))
        return number.real if imaginary <= _TOLERANCE * (1 + abs(number)) else number

    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, mpmath.mpf) and bool(abs(value) < _LARGEST)


def _differ(a: Any, b: Any) -> bool:
    """Whether only one of them is a real number, or both are and differ."""
    if _is_number(a) and _is_number(b):
        return bool(abs(a - b) > _TOLERANCE * (1 + abs(a) + abs(b)))
    return _is_number(a) or _is_number(b)


def _plain(value: Any) -> complex:
    return float(value) if isinstance(value, mpmath.mpf) else complex(value)


def _simplified(point: dict[Any, float], still_differs: Callable[[Mapping[Any, float]], bool]) -> dict[Any, float]:
    """Replace coordinates of the point by 0, or else by 1, where the difference remains."""
    for symbol in point:
        for value in (0.0, 1.0):
            if still_differs({**point, symbol: value}):
                point = {**point, symbol: value}
                break
    return point
