"""Arithmetic of whole numbers. Sums and products wrap around; a quotient is cut towards zero."""

from collections.abc import Callable
from typing import Any

import numpy as np

from llmc.ptx.access import Operands
from llmc.ptx.elementwise import Action, Elementwise
from llmc.ptx.lanes import NUMPY_TYPES, S32, S64, U32, U64, Mask, Values
from llmc.ptx.modifiers import Modifiers
from llmc.ptx.team import Team

WHOLE = ("u16", "s16", "u32", "s32", "u64", "s64", "b16", "b32", "b64", "u16x2", "s16x2")
_WIDER = {"u16": U32, "s16": S32, "u32": U64, "s32": S64}
_PAIRS = {"u16x2": np.dtype("u2"), "s16x2": np.dtype("i2")}

DType = np.dtype[Any]


def simple(function: Callable[..., Values], count: int) -> Callable[[Modifiers, str], Elementwise]:
    """An elementwise numpy function. count: number of operands."""

    def choose(modifiers: Modifiers, kind: str) -> Elementwise:
        if kind in _PAIRS:
            part = _PAIRS[kind]
            return Elementwise((U32,) * count, U32, lambda *values: _by_halves(function, part, *values))
        dtype = NUMPY_TYPES[kind]
        return Elementwise((dtype,) * count, dtype, function)

    return choose


def _by_halves(function: Callable[..., Values], part: DType, *values: Values) -> Values:
    """Apply a function to both halves of words; axes of length 1 stay."""
    halves = [np.ascontiguousarray(value).view(part).reshape(*value.shape, 2) for value in values]
    results = np.ascontiguousarray(function(*halves))
    words: Values = results.view(U32)[..., 0]
    return words


def multiply(modifiers: Modifiers, kind: str) -> Elementwise:
    """mul.lo, mul.hi and mul.wide."""
    part = modifiers.one_of("lo", "hi", "wide")
    dtype = NUMPY_TYPES[kind]
    if part == "lo":
        return Elementwise((dtype, dtype), dtype, np.multiply)
    if part == "hi" and dtype.itemsize == 8:
        return Elementwise((dtype, dtype), dtype, upper_product)
    wide = _wider(modifiers, kind)
    if part == "wide":
        return Elementwise((dtype, dtype), wide, lambda a, b: np.multiply(a, b, dtype=wide))
    shift = np.array(8 * dtype.itemsize, wide)
    return Elementwise((dtype, dtype), dtype, lambda a, b: (np.multiply(a, b, dtype=wide) >> shift).astype(dtype))


def upper_product(a: Values, b: Values) -> Values:
    """The upper 64 bits of products of 64-bit numbers, put together of products of their halves."""
    half, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    x, y = a.view(U64), b.view(U64)
    x1, x0, y1, y0 = x >> half, x & low, y >> half, y & low
    middle = x1 * y0 + (x0 * y0 >> half)
    other = x0 * y1 + (middle & low)
    upper = x1 * y1 + (middle >> half) + (other >> half)
    if a.dtype is S64:
        upper = upper - np.where(a < 0, y, np.uint64(0)) - np.where(b < 0, x, np.uint64(0))
    product: Values = upper.view(a.dtype)
    return product


def multiply_add(modifiers: Modifiers, kind: str) -> Elementwise:
    """mad.lo, mad.hi and mad.wide."""
    part = modifiers.one_of("lo", "hi", "wide")
    dtype = NUMPY_TYPES[kind]
    if part == "lo":
        return Elementwise((dtype,) * 3, dtype, lambda a, b, c: a * b + c)
    wide = _wider(modifiers, kind)
    if part == "wide":
        return Elementwise((dtype, dtype, wide), wide, lambda a, b, c: np.multiply(a, b, dtype=wide) + c)
    shift = np.array(8 * dtype.itemsize, wide)
    return Elementwise((dtype,) * 3, dtype, lambda a, b, c: (np.multiply(a, b, dtype=wide) >> shift).astype(dtype) + c)


def _wider(modifiers: Modifiers, kind: str) -> DType:
    if kind not in _WIDER:
        raise modifiers.refused(f"the machine does not know the product of two {kind}")
    return _WIDER[kind]


def divide(modifiers: Modifiers, kind: str) -> Elementwise:
    """div of whole numbers. A quotient by 0 has all bits set, as on devices."""
    dtype = NUMPY_TYPES[kind]
    nothing = np.array(-1).astype(dtype)

    def function(a: Values, b: Values) -> Values:
        quotient: Values = (a - np.fmod(a, b)) // b
        return np.where(b == 0, nothing, quotient)

    return Elementwise((dtype, dtype), dtype, function)


def remainder(modifiers: Modifiers, kind: str) -> Elementwise:
    """rem, whose result has the sign of the dividend."""
    dtype = NUMPY_TYPES[kind]

    def function(a: Values, b: Values) -> Values:
        return np.where(b == 0, a, np.fmod(a, b))

    return Elementwise((dtype, dtype), dtype, function)


def bounded(function: Callable[..., Values]) -> Callable[[Modifiers, str], Elementwise]:
    """max or min, of signed numbers also with .relu: at least 0."""

    def choose(modifiers: Modifiers, kind: str) -> Elementwise:
        if modifiers.flag("relu"):
            dtype = NUMPY_TYPES[kind]
            if dtype.kind != "i" or kind in _PAIRS:
                raise modifiers.refused(f"the machine does not know .relu of {kind}")
            return Elementwise((dtype, dtype), dtype, lambda a, b: np.maximum(function(a, b), dtype.type(0)))
        return simple(function, 2)(modifiers, kind)

    return choose


INTEGERS: dict[str, Callable[[Modifiers, str], Elementwise]] = {
    "abs": simple(np.abs, 1),
    "add": simple(np.add, 2),
    "div": divide,
    "mad": multiply_add,
    "max": bounded(np.maximum),
    "min": bounded(np.minimum),
    "mul": multiply,
    "neg": simple(np.negative, 1),
    "rem": remainder,
    "sub": simple(np.subtract, 2),
}


def build_carrying(operands: Operands, modifiers: Modifiers) -> Action:
    """mad.lo.cc, mad.hi.cc and madc: products with a carry that goes from one to the next."""
    takes = modifiers.name == "madc"
    part = modifiers.one_of("lo", "hi")
    leaves = modifiers.flag("cc")
    if modifiers.one_of("u32", "s32") == "s32" and part == "hi":
        raise modifiers.refused("the machine supports only carries of .u32")
    modifiers.finish()
    operands.count(4)
    a, b, c = (operands.reader(1 + i, U32) for i in range(3))
    write = operands.writer(0, U32)
    shift = np.uint64(0 if part == "lo" else 32)

    def run(team: Team, mask: Mask) -> None:
        product = np.multiply(a(team), b(team), dtype=U64) >> shift & np.uint64(0xFFFFFFFF)
        total = product + c(team)
        if takes:
            total = total + team.carry
        if leaves:
            team.write_carry(total >> np.uint64(32), mask)
        write(team, total.astype(U32), mask)

    return run
