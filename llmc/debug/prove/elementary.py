"""The elementary functions of graph/pointwise.py over the reals, as sympy expressions.

Rounding is left out: a cast between floating dtypes changes nothing.
"""

from collections.abc import Callable
from typing import Any

import sympy

Expression = Any  # sympy has no types
_HALF = sympy.Rational(1, 2)


def exact(number: float | int | bool) -> Expression:
    """A number as it is written, so that 0.1 is a tenth."""
    if isinstance(number, bool):
        return sympy.true if number else sympy.false
    if isinstance(number, int):
        return sympy.Integer(number)
    special = {"inf": sympy.oo, "-inf": -sympy.oo, "nan": sympy.nan}
    return special.get(repr(number)) or sympy.Rational(repr(number))


def _sigmoid(x: Expression) -> Expression:
    return 1 / (1 + sympy.exp(-x))


def _where(condition: Expression, x: Expression, y: Expression) -> Expression:
    return sympy.Piecewise((x, condition), (y, True))


def from_bool(x: Expression) -> Expression:
    """1 for true, 0 for false."""
    return _where(x, sympy.S.One, sympy.S.Zero) if isinstance(x, sympy.logic.boolalg.Boolean) else x


def _same(x: Expression) -> Expression:
    return x


def _to_int(x: Expression) -> Expression:
    return sympy.sign(from_bool(x)) * sympy.floor(sympy.Abs(from_bool(x)))


MEANINGS: dict[str, Callable[..., Expression]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "floor_div": lambda x, y: sympy.floor(x / y),
    "pow": lambda x, y: x**y,
    "maximum": sympy.Max,
    "minimum": sympy.Min,
    "remainder": lambda x, y: x - y * sympy.floor(x / y),
    "lt": sympy.Lt,
    "le": sympy.Le,
    "gt": sympy.Gt,
    "ge": sympy.Ge,
    "eq": sympy.Eq,
    "ne": sympy.Ne,
    "and": sympy.And,
    "or": sympy.Or,
    "not": sympy.Not,
    "neg": lambda x: -x,
    "abs": sympy.Abs,
    "square": lambda x: x**2,
    "reciprocal": lambda x: 1 / x,
    "sqrt": sympy.sqrt,
    "rsqrt": lambda x: 1 / sympy.sqrt(x),
    "exp": sympy.exp,
    "log": sympy.log,
    "sin": sympy.sin,
    "cos": sympy.cos,
    "erf": sympy.erf,
    "floor": sympy.floor,
    "ceil": sympy.ceiling,
    "tanh": sympy.tanh,
    "sigmoid": _sigmoid,
    "silu": lambda x: x * _sigmoid(x),
    "gelu": lambda x: x * _HALF * (1 + sympy.erf(x / sympy.sqrt(2))),
    "gelu_tanh": lambda x: x * _HALF * (1 + sympy.tanh(sympy.sqrt(2 / sympy.pi) * (x + exact(0.044715) * x**3))),
    "relu": lambda x: sympy.Max(x, 0),
    "softplus": lambda x: sympy.log(1 + sympy.exp(x)),
    "to_float": from_bool,
    "to_int": _to_int,
    "to_bool": lambda x: sympy.Ne(x, 0),
    "round_bf16": _same,
    "round_f16": _same,
    "where": _where,
}
