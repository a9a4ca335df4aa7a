"""Rounding between the float formats, to the nearest even number unless said otherwise."""

import numpy as np

from llmc.ptx.lanes import F16, F32, F64, S64, U8, U16, U32, Values

_BF16_NAN = np.uint16(0x7FFF)
# Below it single precision has fewer bits.
_LEAST_NORMAL = 2.0**-126
_TIE_BITS, _TIE = np.int64((1 << 29) - 1), np.int64(1 << 28)


def bf16_of_f32(value: Values) -> Values:
    """The bits of bf16 numbers. A NaN is 0x7fff."""
    bits = value.view(U32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1)) >> np.uint32(16)).astype(U16)
    is_nan = np.isnan(value)
    return np.where(is_nan, _BF16_NAN, rounded) if is_nan.any() else rounded


def f32_of_bf16(bits: Values) -> Values:
    """Convert bf16 numbers, which are single precision's upper halves."""
    return (bits.astype(U32) << np.uint32(16)).view(F32)


def f32_of_sum(product: Values, addend: Values) -> Values:
    """product + addend, rounded once to single precision. Both in fp64, the product exact.

    The sum of fp64 is rounded already. That matters only where it lies halfway between two numbers of single precision,
    or is so small that these have fewer bits: there the rounding error says which is nearer.
    """
    total = product + addend
    is_tie = (total.view(S64) & _TIE_BITS) == _TIE
    magnitude = np.abs(total)
    if is_tie.any() or (
        float(magnitude.min(initial=1.0)) < _LEAST_NORMAL and ((magnitude < _LEAST_NORMAL) & (total != 0)).any()
    ):
        total = odd_sum(product, addend, total)
    return total.astype(F32)


def odd_sum(product: Values, addend: Values, total: Values) -> Values:
    """A sum of two fp64 numbers rounded to odd: rounding it again to fewer bits is as rounding once."""
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = np.ascontiguousarray(total).view(S64)
    is_even = (bits & np.int64(1)) == 0
    step = np.where((error > 0) == (total > 0), np.int64(1), np.int64(-1))
    moves = is_even & (error != 0) & np.isfinite(error) & (total != 0)
    return np.where(moves, bits + step, bits).view(F64)


def bf16_of_sum(product: Values, addend: Values) -> Values:
    """Add as `f32_of_sum` does, and round to bf16."""
    total = odd_sum(product, addend, product + addend)
    return bf16_of_f32(_odd_f32(total))


def f16_of_sum(product: Values, addend: Values) -> Values:
    """Add as `f32_of_sum` does, and round to half precision."""
    return odd_sum(product, addend, product + addend).astype(F16)


def _odd_f32(value: Values) -> Values:
    """fp64 numbers rounded to odd in single precision."""
    nearest = value.astype(F32)
    bits = nearest.view(U32)
    rest = value - nearest.astype(F64)
    is_even = (bits & np.uint32(1)) == 0
    moves = is_even & (rest != 0) & np.isfinite(rest) & (nearest != 0)
    step = np.where((rest > 0) == (value > 0), np.uint32(1), np.uint32(0xFFFFFFFF))
    return np.where(moves, bits + step, bits).view(F32)


def flushed(value: Values) -> Values:
    """Single precision with subnormal numbers as zeros of their sign."""
    bits = value.view(U32)
    is_small = (bits & np.uint32(0x7F800000)) == 0
    return np.where(is_small, bits & np.uint32(0x80000000), bits).view(F32) if is_small.any() else value


# ---- eight bits ------------------------------------------------------------------------------------------------------


def _numbers_of_e4m3() -> Values:
    """The 256 numbers of e4m3: exponent bias 7, no infinities, 0x7f is NaN."""
    codes = np.arange(256)
    exponent, fraction = codes >> 3 & 15, codes & 7
    size = np.where(exponent == 0, fraction / 8 * 2.0**-6, (1 + fraction / 8) * 2.0 ** (exponent - 7.0))
    size = np.where((codes & 127) == 127, np.nan, size)
    return np.where(codes & 128, -size, size).astype(F32)


E4M3_NUMBERS = _numbers_of_e4m3()
# e5m2 is half precision's upper byte.
E5M2_NUMBERS = (np.arange(256, dtype=U16) << np.uint16(8)).view(F16).astype(F32)


def e4m3_of_f32(value: Values) -> Values:
    """The codes of e4m3 numbers; what is too large becomes the largest, 448."""
    return _codes_of(value, E4M3_NUMBERS[:127], np.uint8(0x7F))


def e5m2_of_f32(value: Values) -> Values:
    """The codes of e5m2 numbers; what is too large becomes the largest, 57344."""
    return _codes_of(value, E5M2_NUMBERS[:124], np.uint8(0x7F))


def _codes_of(value: Values, numbers: Values, nan: np.uint8) -> Values:
    """The nearest of ascending numbers that begin with 0; between two the one with an even code."""
    size = np.abs(value).astype(F64)
    middles = (numbers[1:].astype(F64) + numbers[:-1].astype(F64)) / 2
    below, above = np.searchsorted(middles, size, "left"), np.searchsorted(middles, size, "right")
    code = np.where(below & 1, above, below).astype(U8)
    code = np.where(np.isnan(value), nan, code)
    return np.where(np.signbit(value) & ~np.isnan(value), code | np.uint8(0x80), code)
