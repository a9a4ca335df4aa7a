"""Device code for quantized weights: what codes stand for, without a table in memory.

Integers and narrow floats are put together from their bits, so that every target and the interpreter compute the same
exact numbers, and no slow conversion from bytes is needed. Formats are those of llmc/ops/weight_codes.py. Codes of
fewer than 8 bits share places (codegen/triton/code_rows.py): place 16·i + j holds channel 32·i + j in the low half of a
byte, and channel 32·i + 16 + j in the high half.
"""

import triton
import triton.language as tl

from llmc.codegen.triton.kernels.products.format_facts import (
    above_bits,
    has_integer_table,
    low_bits,
    stored_zero,
    table_word,
)
from llmc.codegen.triton.kernels.products.operand_tiles import read_tile

# 1.5·2²³: a small integer added to its bits is added to the number.
_INTEGER_BITS = tl.constexpr(0x4B400000)
_INTEGER = tl.constexpr(12582912.0)


@triton.jit
def load_codes(
    row_ptr: tl.tensor, place: tl.tensor, inside: tl.tensor, FORMAT: tl.constexpr, MASKED: tl.constexpr
) -> tl.tensor:
    """Bytes of a row's first plane, or its codes of 8 bits: of both channels of each place. MASKED: whether a place may
    not be inside."""
    if low_bits(FORMAT) >= 4:
        return read_tile(row_ptr + place, inside, MASKED)
    else:
        return _load_plane(row_ptr, place, inside, low_bits(FORMAT), MASKED)


@triton.jit
def load_above(
    row_ptr: tl.tensor,
    place: tl.tensor,
    inside: tl.tensor,
    PLACES: tl.constexpr,
    FORMAT: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """Read the second plane, int32, of a row of PLACES codes. The result is unused if the format has one plane."""
    if above_bits(FORMAT) > 0:
        return _load_plane(row_ptr + PLACES * low_bits(FORMAT) // 4, place, inside, above_bits(FORMAT), MASKED)
    else:
        return place


@triton.jit
def _load_plane(
    plane_ptr: tl.tensor, place: tl.tensor, inside: tl.tensor, BITS: tl.constexpr, MASKED: tl.constexpr
) -> tl.tensor:
    """Bits from a plane of 1 or 2 bits, int32: a place's low channel from bit 0 up, its high one from bit 4 up.
    Neighbours in a run of 16 places share bytes, which are close together: they come from the level-1 cache."""
    RUN: tl.constexpr = 4 * BITS
    found = read_tile(plane_ptr + (place // 16 * RUN + place % RUN), inside, MASKED)
    return found.to(tl.int32) >> (place % 16 // RUN * BITS)


@triton.jit
def low_codes(codes: tl.tensor, above: tl.tensor, FORMAT: tl.constexpr) -> tl.tensor:
    """int32 codes of low channels: what the planes have of them, or the whole bytes of a format of 8 bits."""
    LOW: tl.constexpr = low_bits(FORMAT)
    ABOVE: tl.constexpr = above_bits(FORMAT)
    if LOW == 8:
        return codes.to(tl.int32)
    elif ABOVE > 0:
        return (codes.to(tl.int32) & ((1 << LOW) - 1)) | ((above & ((1 << ABOVE) - 1)) << LOW)
    else:
        return codes.to(tl.int32) & ((1 << LOW) - 1)


@triton.jit
def high_codes(codes: tl.tensor, above: tl.tensor, FORMAT: tl.constexpr) -> tl.tensor:
    """The same of high channels."""
    return low_codes(codes.to(tl.int32) >> 4, above >> 4, FORMAT)


@triton.jit
def signed_codes(codes: tl.tensor, FORMAT: tl.constexpr) -> tl.tensor:
    """The integers that int32 codes stand for, of formats of integers and of tables of them."""
    if has_integer_table(FORMAT):
        first = tl.where((codes & 4) != 0, table_word(FORMAT, 1), table_word(FORMAT, 0))
        second = tl.where((codes & 4) != 0, table_word(FORMAT, 3), table_word(FORMAT, 2))
        words = tl.where(codes >= 8, second, first)
        return ((words >> ((codes & 3) * 8)) & 255) - 128
    elif stored_zero(FORMAT) > 0:
        return codes - stored_zero(FORMAT)
    else:
        return codes


@triton.jit
def code_values(codes: tl.tensor, zeros: tl.tensor, FORMAT: tl.constexpr) -> tl.tensor:
    """The values of int32 codes before scaling, fp32. zeros: fp32, for integer formats; broadcast to codes."""
    if FORMAT == "fp8":
        return e4m3_values(codes)
    elif FORMAT == "mxfp4":
        # e2m1 in the place of fp32's exponent and mantissa, 2^126 too small.
        bits = ((codes & 7) << 22) | ((codes & 8) << 28)
        return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37
    elif FORMAT == "nf4":
        return _nf4_values(codes)
    else:
        signed = signed_codes(codes, FORMAT)
        return (signed + _INTEGER_BITS).to(tl.float32, bitcast=True) - (_INTEGER + zeros)


@triton.jit
def small_floats(integers: tl.tensor) -> tl.tensor:
    """fp32 of int32 of up to 2²²."""
    return (integers + _INTEGER_BITS).to(tl.float32, bitcast=True) - _INTEGER


@triton.jit
def e4m3_values(codes: tl.tensor) -> tl.tensor:
    """fp32 of the bits of e4m3fn in int32, NaN aside: in the place of fp32's bits, 2^120 too small."""
    bits = ((codes & 0x7F) << 20) | ((codes & 0x80) << 24)
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36


@triton.jit
def e4m3_codes(values: tl.tensor) -> tl.tensor:
    """The bits of the nearest e4m3fn, int32, ties to even, of fp32 values of up to 448."""
    bits = values.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    rounded = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20
    normal = rounded - (120 << 3)
    # Below 2^-6 codes are multiples of 2^-9.
    small = nearest_integers(tl.abs(values) * 512.0)
    return tl.where(magnitude < (121 << 23), small, normal) | ((bits >> 24) & 0x80)


@triton.jit
def nearest_integers(values: tl.tensor) -> tl.tensor:
    """int32 of fp32 values of up to 2²², ties to even: where one is added, fp32 has no digits after the point."""
    return (values + _INTEGER).to(tl.int32, bitcast=True) - _INTEGER_BITS


@triton.jit
def _nf4_values(codes: tl.tensor) -> tl.tensor:
    """The quantiles of llmc/ops/weight_codes.py, by halving: no memory is read for them."""
    first, second, third = (codes & 1) != 0, (codes & 2) != 0, (codes & 4) != 0
    a = tl.where(second, tl.where(first, -0.39491748809814453, -0.5250730514526367),
                 tl.where(first, -0.6961928009986877, -1.0))  # fmt: skip
    b = tl.where(second, tl.where(first, 0.0, -0.09105003625154495),
                 tl.where(first, -0.18477343022823334, -0.28444138169288635))  # fmt: skip
    c = tl.where(second, tl.where(first, 0.33791524171829224, 0.24611230194568634),
                 tl.where(first, 0.16093020141124725, 0.07958029955625534))  # fmt: skip
    d = tl.where(second, tl.where(first, 1.0, 0.7229568362236023),
                 tl.where(first, 0.5626170039176941, 0.44070982933044434))  # fmt: skip
    return tl.where(codes >= 8, tl.where(third, d, c), tl.where(third, b, a))
