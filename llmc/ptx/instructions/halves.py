"""Arithmetic of half precision and bf16, of one number or of two in a word.

Each result is rounded once. Sums and products of single precision have bits enough that rounding them again is as
rounding once (Figueroa 1995); fma is summed in double precision, rounded to odd.
"""

from collections.abc import Callable

import numpy as np

from llmc.ptx.elementwise import Elementwise
from llmc.ptx.lanes import F16, F32, F64, NUMPY_TYPES, U16, U32, Values
from llmc.ptx.modifiers import Modifiers
from llmc.ptx.rounding import bf16_of_f32, bf16_of_sum, f16_of_sum, f32_of_bf16

HALVES = ("f16", "bf16", "f16x2", "bf16x2")
_SIGN = np.uint16(0x8000)


def widened(bits: Values, kind: str) -> Values:
    """Convert numbers of 16 bits to single precision. bits: their bits."""
    return f32_of_bf16(bits) if kind.startswith("bf16") else bits.view(F16).astype(F32)


def narrowed(value: Values, kind: str) -> Values:
    """The bits of numbers of single precision in 16 bits; a NaN is 0x7fff."""
    if kind.startswith("bf16"):
        return bf16_of_f32(value)
    bits = value.astype(F16).view(U16)
    is_nan = np.isnan(value)
    return np.where(is_nan, np.uint16(0x7FFF), bits) if is_nan.any() else bits


def _of_bits(kind: str, count: int, function: Callable[..., Values]) -> Elementwise:
    """An elementwise function of 16-bit numbers' bits."""
    dtype = NUMPY_TYPES[kind]
    if kind in ("f16", "bf16"):
        as_bits = np.dtype("u2")
        return Elementwise((as_bits,) * count, as_bits, function)

    def by_halves(*words: Values) -> Values:
        low = function(*(word.astype(U16) for word in words))
        high = function(*((word >> np.uint32(16)).astype(U16) for word in words))
        word: Values = low.astype(U32) | high.astype(U32) << np.uint32(16)
        return word

    return Elementwise((dtype,) * count, dtype, by_halves)


def _through_f32(function: Callable[..., Values], count: int) -> Callable[[Modifiers, str], Elementwise]:
    def choose(modifiers: Modifiers, kind: str) -> Elementwise:
        modifiers.flag("rn")
        return _of_bits(kind, count, lambda *bits: narrowed(function(*(widened(bit, kind) for bit in bits)), kind))

    return choose


def _fused(modifiers: Modifiers, kind: str) -> Elementwise:
    modifiers.one_of("rn")
    has_relu = modifiers.flag("relu")
    rounded = bf16_of_sum if kind.startswith("bf16") else _f16_bits_of_sum

    def function(*bits: Values) -> Values:
        a, b, c = (widened(bit, kind).astype(F64) for bit in bits)
        result = rounded(a * b, c)
        return np.where(result & _SIGN, np.uint16(0), result) if has_relu else result

    return _of_bits(kind, 3, function)


def _f16_bits_of_sum(product: Values, addend: Values) -> Values:
    total = f16_of_sum(product, addend)
    return np.where(np.isnan(total), np.uint16(0x7FFF), total.view(U16))


def _sign_bits(function: Callable[[Values], Values]) -> Callable[[Modifiers, str], Elementwise]:
    return lambda modifiers, kind: _of_bits(kind, 1, function)


def _largest(of: Callable[..., Values], spread: Callable[..., Values], is_max: bool) -> Callable[..., Elementwise]:
    """Return the maximum or minimum as in single precision: -0 is smaller than 0."""
    merge = np.bitwise_and if is_max else np.bitwise_or

    def choose(modifiers: Modifiers, kind: str) -> Elementwise:
        function = spread if modifiers.flag("NaN") else of

        def ordered(a: Values, b: Values) -> Values:
            first, second = widened(a, kind), widened(b, kind)
            return np.where(first == second, merge(a, b), narrowed(function(first, second), kind))

        return _of_bits(kind, 2, ordered)

    return choose


HALF_FUNCTIONS: dict[str, Callable[[Modifiers, str], Elementwise]] = {
    "abs": _sign_bits(lambda bits: bits & ~_SIGN),
    "add": _through_f32(np.add, 2),
    "ex2": lambda modifiers, kind: _approximate(modifiers, kind, np.exp2),
    "fma": _fused,
    "max": _largest(np.fmax, np.maximum, True),
    "min": _largest(np.fmin, np.minimum, False),
    "mul": _through_f32(np.multiply, 2),
    "neg": _sign_bits(lambda bits: bits ^ _SIGN),
    "sub": _through_f32(np.subtract, 2),
    "tanh": lambda modifiers, kind: _approximate(modifiers, kind, np.tanh),
}


def _approximate(modifiers: Modifiers, kind: str, function: Callable[[Values], Values]) -> Elementwise:
    modifiers.one_of("approx")
    return _through_f32(lambda value: function(value.astype(F64)).astype(F32), 1)(modifiers, kind)
