"""Arithmetic of single and double precision.

Sums, products, quotients by `.rn` and roots by `.rn` are IEEE's. With .ftz subnormal operands and results are zeros of
their sign. Approximations (`.approx`, `div.full`) are computed as exactly as the format allows, which the PTX manual
allows a device. max and min leave a NaN operand out; with .NaN the result is a NaN.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from llmc.ptx.elementwise import Elementwise
from llmc.ptx.lanes import F32, F64, U32, U64, Values
from llmc.ptx.modifiers import Modifiers
from llmc.ptx.rounding import f32_of_sum, flushed

DType = np.dtype[Any]
_TYPES = {"f32": F32, "f64": F64}


def _float(modifiers: Modifiers, kind: str, count: int, function: Callable[..., Values]) -> Elementwise:
    """An elementwise function whose operands and result have one format; accepts .ftz and .sat."""
    dtype = _TYPES[kind]
    if modifiers.flag("ftz"):
        function = _flushing(function)
    if modifiers.flag("sat"):
        function = _saturating(function)
    return Elementwise((dtype,) * count, dtype, function)


def _flushing(function: Callable[..., Values]) -> Callable[..., Values]:
    return lambda *values: flushed(function(*map(flushed, values)))


def _saturating(function: Callable[..., Values]) -> Callable[..., Values]:
    """Limit a function's result to 0 … 1; a NaN becomes 0."""
    return lambda *values: np.fmin(np.fmax(function(*values), np.float32(0)), np.float32(1))


def _rounded(function: Callable[..., Values], count: int) -> Callable[[Modifiers, str], Elementwise]:
    """Round to the nearest even number, as numpy does."""

    def choose(modifiers: Modifiers, kind: str) -> Elementwise:
        modifiers.flag("rn")
        return _float(modifiers, kind, count, function)

    return choose


def _plain(function: Callable[..., Values], count: int) -> Callable[[Modifiers, str], Elementwise]:
    return lambda modifiers, kind: _float(modifiers, kind, count, function)


def _fused(modifiers: Modifiers, kind: str) -> Elementwise:
    """fma: the product is exact in double precision, where that is enough."""
    modifiers.one_of("rn")
    if kind != "f32":
        raise modifiers.refused("the machine supports only fma of single precision")
    return _float(modifiers, kind, 3, fused_multiply_add)


def fused_multiply_add(a: Values, b: Values, c: Values) -> Values:
    """a · b + c in single precision, rounded once."""
    return f32_of_sum(np.multiply(a, b, dtype=F64), c.astype(F64))


def _divided(modifiers: Modifiers, kind: str) -> Elementwise:
    """div.rn is exact; div.full and div.approx may be off by 2 units in the last place, and are not."""
    way = modifiers.one_of("rn", "full", "approx")
    if way == "approx":
        return _float(modifiers, kind, 2, _quotient_of_normal)
    return _float(modifiers, kind, 2, np.true_divide)


def _quotient_of_normal(a: Values, b: Values) -> Values:
    """Divide as div.approx: for a divisor above 2¹²⁶ the quotient is 0, and of an infinite dividend a NaN."""
    size = np.abs(b)
    is_huge = (size > np.float32(2.0**126)) & np.isfinite(b)
    quotient = a / b
    if not is_huge.any():
        return quotient
    return np.where(is_huge, np.where(np.isfinite(a), np.float32(0), np.float32(np.nan)), quotient)


def _exact(function: Callable[[Values], Values]) -> Callable[[Modifiers, str], Elementwise]:
    """An approximation, computed in double precision and rounded once; or .rn where that is the same."""

    def rounded(value: Values) -> Values:
        return function(value.astype(F64)).astype(F32)

    def choose(modifiers: Modifiers, kind: str) -> Elementwise:
        modifiers.one_of("approx", "rn")
        if kind != "f32":
            raise modifiers.refused("the machine supports it only in single precision")
        return _float(modifiers, kind, 1, rounded)

    return choose


def _reciprocal_root(value: Values) -> Values:
    return 1 / np.sqrt(value)


def _largest(of: Callable[..., Values], spread: Callable[..., Values], is_max: bool) -> Callable[..., Elementwise]:
    """max or min. of: ignores NaN; spread: propagates NaN. -0 is smaller than +0."""

    def choose(modifiers: Modifiers, kind: str) -> Elementwise:
        function = spread if modifiers.flag("NaN") else of
        unsigned = U32 if kind == "f32" else U64
        merge = np.bitwise_and if is_max else np.bitwise_or

        def ordered(a: Values, b: Values) -> Values:
            extreme = function(a, b)
            if (extreme == 0).any():
                zeros = merge(a.view(unsigned), b.view(unsigned))
                extreme = np.where(a == b, zeros, extreme.view(unsigned)).view(extreme.dtype)
            return extreme

        return _float(modifiers, kind, 2, ordered)

    return choose


FLOATS: dict[str, Callable[[Modifiers, str], Elementwise]] = {
    "abs": _plain(np.abs, 1),
    "add": _rounded(np.add, 2),
    "cos": _exact(np.cos),
    "div": _divided,
    "ex2": _exact(np.exp2),
    "fma": _fused,
    "lg2": _exact(np.log2),
    "max": _largest(np.fmax, np.maximum, True),
    "min": _largest(np.fmin, np.minimum, False),
    "mul": _rounded(np.multiply, 2),
    "neg": _plain(np.negative, 1),
    "rcp": _exact(np.reciprocal),
    "rsqrt": _exact(_reciprocal_root),
    "sin": _exact(np.sin),
    "sqrt": _exact(np.sqrt),
    "sub": _rounded(np.subtract, 2),
    "tanh": _exact(np.tanh),
}
