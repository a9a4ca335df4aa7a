"""cvt: from one type to another, with PTX's rounding; and cvta, which changes nothing here."""

from collections.abc import Callable
from typing import Any

import numpy as np

from llmc.ptx.access import Operands
from llmc.ptx.elementwise import Action, Elementwise, applied
from llmc.ptx.instructions.halves import narrowed, widened
from llmc.ptx.lanes import F32, F64, NUMPY_TYPES, U16, U32, U64, Mask, Values, constant
from llmc.ptx.modifiers import Modifiers
from llmc.ptx.rounding import E4M3_NUMBERS, E5M2_NUMBERS, e4m3_of_f32, e5m2_of_f32, flushed
from llmc.ptx.team import Team

DType = np.dtype[Any]
_WHOLE = ("u8", "u16", "u32", "u64", "s8", "s16", "s32", "s64")
_FLOATS = ("f16", "bf16", "f32", "f64")
_TO_WHOLE = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
_OCTET_PAIRS = {"e4m3x2": (E4M3_NUMBERS, e4m3_of_f32), "e5m2x2": (E5M2_NUMBERS, e5m2_of_f32)}


def build_cvt(operands: Operands, modifiers: Modifiers) -> Action:
    """cvt of one number, or of two into one word."""
    source, target = modifiers.last(), modifiers.last()
    if target in ("f16x2", "bf16x2") and source == "f32":
        return _pair(operands, modifiers, target)
    if target in _OCTET_PAIRS:
        return _octet_pair(operands, modifiers, target, source)
    if source in _OCTET_PAIRS and target == "f16x2":
        return _octets_to_pair(operands, modifiers, source)
    operands.count(2)
    if target in _WHOLE and source in _WHOLE:
        convert = _between_whole(NUMPY_TYPES[target], modifiers.flag("sat"))
    elif target in _WHOLE and source in _FLOATS:
        convert = _to_whole(modifiers, target, source)
    elif target in _FLOATS and source in _WHOLE:
        modifiers.one_of("rn")
        convert = _from_whole(target)
    elif target in _FLOATS and source in _FLOATS:
        convert = _between_floats(modifiers, target, source)
    else:
        raise modifiers.refused(f"the machine does not know it of .{source} to .{target}")
    modifiers.finish()
    return applied(operands, Elementwise((_bits(source),), _bits(target), convert))


def _bits(kind: str) -> DType:
    """Numbers of 16 bits are bits."""
    return U16 if kind in ("f16", "bf16") else NUMPY_TYPES[kind]


def _between_whole(dtype: DType, saturates: bool) -> Callable[[Values], Values]:
    if not saturates:
        return lambda value: value.astype(dtype)
    limits = np.iinfo(dtype)

    def convert(value: Values) -> Values:
        own = np.iinfo(value.dtype)
        low, high = max(own.min, limits.min), min(own.max, limits.max)
        return np.clip(value, value.dtype.type(low), value.dtype.type(high)).astype(dtype)

    return convert


def _to_whole(modifiers: Modifiers, target: str, source: str) -> Callable[[Values], Values]:
    """Values that do not fit saturate. A NaN becomes 0; to or from 64 bits, only the highest bit is set."""
    rounding = _TO_WHOLE[modifiers.one_of(*_TO_WHOLE)]
    flushes = modifiers.flag("ftz")
    modifiers.flag("sat")
    dtype = NUMPY_TYPES[target]
    limits = np.iinfo(dtype)
    is_wide = dtype.itemsize == 8 or source == "f64"
    nan = constant(1 << 8 * dtype.itemsize - 1 if is_wide else 0, dtype)
    # The largest number that both the type and double precision have.
    most = float(limits.max) if dtype.itemsize < 8 else float(np.nextafter(float(limits.max), 0))

    def convert(value: Values) -> Values:
        number = _number(value, source)
        number = flushed(number) if flushes and number.dtype is F32 else number
        whole = rounding(number.astype(F64))
        is_nan = np.isnan(whole)
        clipped = np.clip(np.where(is_nan, 0, whole), float(limits.min), most).astype(dtype)
        if dtype.itemsize == 8:
            clipped = np.where(whole >= float(limits.max), dtype.type(limits.max), clipped)
        return np.where(is_nan, nan, clipped)

    return convert


def _number(value: Values, kind: str) -> Values:
    return widened(value, kind) if kind in ("f16", "bf16") else value


def _from_whole(target: str) -> Callable[[Values], Values]:
    if target in ("f32", "f64"):
        return lambda value: value.astype(NUMPY_TYPES[target])
    # Whole numbers of up to 32 bits are exact in double precision, and rounding to odd first makes it one rounding.
    return lambda value: narrowed(_odd(value), target)


def _odd(value: Values) -> Values:
    """Whole numbers in single precision, rounded to odd."""
    wide = value.astype(F64)
    nearest = wide.astype(F32)
    bits = nearest.view(U32)
    rest = wide - nearest.astype(F64)
    step = np.where((rest > 0) == (wide > 0), np.uint32(1), np.uint32(0xFFFFFFFF))
    return np.where((rest != 0) & (bits & np.uint32(1) == 0), bits + step, bits).view(F32)


def _between_floats(modifiers: Modifiers, target: str, source: str) -> Callable[[Values], Values]:
    """Wider is exact; narrower rounds to the nearest even. The same width rounds to a whole number."""
    flushes, has_relu = modifiers.flag("ftz"), modifiers.flag("relu")
    if target == source == "f32":
        rounding = _TO_WHOLE[modifiers.one_of(*_TO_WHOLE)]
        return lambda value: rounding(flushed(value) if flushes else value)
    widens = NUMPY_TYPES[target].itemsize > NUMPY_TYPES[source].itemsize
    if not widens:
        modifiers.one_of("rn")
    if target == "f64" or source == "f64":
        if "f16" in (target, source) or "bf16" in (target, source):
            raise modifiers.refused("the machine converts double precision to and from single precision only")
        return lambda value: value.astype(NUMPY_TYPES[target])
    if target == "f32":
        return lambda value: widened(value, source)

    def convert(value: Values) -> Values:
        number = _number(value, source)
        return narrowed(_at_least_0(number) if has_relu else number, target)

    return convert


def _at_least_0(value: Values) -> Values:
    """.relu: a NaN stays one."""
    return np.maximum(value, np.float32(0))


def _pair(operands: Operands, modifiers: Modifiers, target: str) -> Action:
    """Two numbers of single precision into one word: the first into its upper half."""
    modifiers.one_of("rn")
    has_relu = modifiers.flag("relu")
    modifiers.finish()
    operands.count(3)
    upper, lower = operands.reader(1, F32), operands.reader(2, F32)
    write = operands.writer(0, U32)

    def run(team: Team, mask: Mask) -> None:
        high, low = upper(team), lower(team)
        if has_relu:
            high, low = _at_least_0(high), _at_least_0(low)
        word = narrowed(high, target).astype(U32) << np.uint32(16) | narrowed(low, target).astype(U32)
        write(team, word, mask)

    return run


def _octet_pair(operands: Operands, modifiers: Modifiers, target: str, source: str) -> Action:
    """Two numbers into two of eight bits: the first of two operands, or the upper half, into the upper byte."""
    modifiers.one_of("rn")
    modifiers.one_of("satfinite")
    modifiers.finish()
    encode = _OCTET_PAIRS[target][1]
    write = operands.writer(0, U16)
    if source == "f32":
        operands.count(3)
        upper, lower = operands.reader(1, F32), operands.reader(2, F32)
        return lambda team, mask: write(team, _joined(encode(upper(team)), encode(lower(team))), mask)
    if source not in ("f16x2", "bf16x2"):
        raise modifiers.refused(f"the machine does not know it of .{source}")
    operands.count(2)
    word = operands.reader(1, U32)

    def run(team: Team, mask: Mask) -> None:
        bits = word(team)
        halves = (widened(part.astype(U16), source) for part in (bits >> np.uint32(16), bits))
        write(team, _joined(*(encode(half) for half in halves)), mask)

    return run


def _joined(upper: Values, lower: Values) -> Values:
    word: Values = upper.astype(U16) << np.uint16(8) | lower.astype(U16)
    return word


def _octets_to_pair(operands: Operands, modifiers: Modifiers, source: str) -> Action:
    """Two numbers of eight bits into two of half precision, which is exact."""
    modifiers.one_of("rn")
    modifiers.finish()
    operands.count(2)
    numbers = _OCTET_PAIRS[source][0]
    octets, write = operands.reader(1, U16), operands.writer(0, U32)

    def run(team: Team, mask: Mask) -> None:
        bits = octets(team)
        high, low = (
            narrowed(numbers[part], "f16").astype(U32) for part in (bits >> np.uint16(8), bits & np.uint16(255))
        )
        write(team, high << np.uint32(16) | low, mask)

    return run


def build_cvta(operands: Operands, modifiers: Modifiers) -> Action:
    """cvta: addresses of global memory are the same everywhere."""
    modifiers.flag("to")
    modifiers.one_of("global")
    modifiers.one_of("u64")
    modifiers.finish()
    operands.count(2)
    return applied(operands, Elementwise((U64,), U64, lambda value: value))
