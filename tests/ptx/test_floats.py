"""Arithmetic of floats against exact rational numbers: rounded once, flushed where asked, with PTX's NaN and zeros."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from llmc.ptx.rounding import E4M3_NUMBERS
from tests.ptx.ptx_text import Array, apply

NAN_BITS, NAN_HALF = 0x7FFFFFFF, 0x7FFF
ENDS = 2**31 - 1, -(2**31)
_SPECIAL = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 1e-45, -1e-40, 1.1754944e-38, 3.4028235e38]
SPECIAL = np.array(_SPECIAL, np.float32)


def floats(seed: int, count: int = 992) -> Array:
    """Numbers of all sizes, as bits are drawn."""
    bits = np.random.default_rng(seed).integers(0, 2**32, count, dtype=np.uint32)
    return np.concatenate([bits.view(np.float32), SPECIAL])


def near(seed: int, count: int = 1000) -> Array:
    """Numbers of a size, whose sums cancel."""
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


def rounded(exact: Fraction) -> np.float32:
    """The nearest number of single precision, by trying the two around it."""
    guess = np.float32(float(exact))
    around = [guess, np.nextafter(guess, np.float32(-np.inf)), np.nextafter(guess, np.float32(np.inf))]
    finite = [neighbour for neighbour in around if np.isfinite(neighbour)]
    return min(finite, key=lambda each: (abs(Fraction(float(each)) - exact), int(each.view(np.uint32)) & 1))


@pytest.mark.parametrize("scale", [1.0, 2.0**-70, 2.0**-74])
def test_fma_is_rounded_once(scale: float) -> None:
    """Also where the sum in double precision is halfway between two numbers, and where the result is subnormal."""
    a, b, c = near(0) * np.float32(scale), near(1) * np.float32(scale), near(2) * np.float32(scale) * np.float32(scale)
    a[:4], b[:4] = np.float32(1 + 2**-12), np.float32(1 + 2**-12) * np.float32(scale)
    a[:4] *= np.float32(scale)
    c[:4] = np.array([2**-53, -(2**-53), 2**-60, -(2**-60)]) * scale * scale
    actual = apply("fma.rn.f32", a, b, c, result=np.float32)
    exact = ([Fraction(float(number)) for number in row] for row in zip(a, b, c, strict=True))
    wanted = [rounded(x * y + z) for x, y, z in exact]
    np.testing.assert_array_equal(actual, np.array(wanted))


@pytest.mark.parametrize(
    ("opcode", "function"),
    [("add.f32", np.add), ("sub.rn.f32", np.subtract), ("mul.f32", np.multiply), ("div.rn.f32", np.divide)],
)
def test_rounded_arithmetic(opcode: str, function: np.ufunc) -> None:
    a, b = floats(3), floats(4)
    with np.errstate(all="ignore"):
        wanted = function(a, b)
    actual = apply(opcode, a, b, result=np.uint32)
    is_nan = np.isnan(wanted)
    np.testing.assert_array_equal(actual[~is_nan], wanted.view(np.uint32)[~is_nan])
    assert is_nan.any() and (actual[is_nan] == NAN_BITS).all()


def test_subnormal_numbers_are_kept_or_flushed() -> None:
    a, b = np.array([1e-40, -1e-40, 1e-38, 2.0], np.float32), np.array([1.0, 1.0, 0.5, 1e-40], np.float32)
    assert (apply("mul.f32", a, b, result=np.float32) != 0).all()
    np.testing.assert_array_equal(
        apply("mul.ftz.f32", a, b, result=np.float32).view(np.uint32), np.array([0, 1 << 31, 0, 0], np.uint32)
    )
    np.testing.assert_array_equal(apply("add.ftz.f32", a, b, result=np.float32), np.array([1, 1, 0.5, 2], np.float32))


def test_largest_and_smallest() -> None:
    a = np.array([1.0, np.nan, np.nan, 0.0, -0.0, -np.inf], np.float32)
    b = np.array([np.nan, 2.0, np.nan, -0.0, 0.0, 5.0], np.float32)
    largest = apply("max.f32", a, b, result=np.uint32)
    np.testing.assert_array_equal(largest, [0x3F800000, 0x40000000, NAN_BITS, 0, 0, 0x40A00000])
    smallest = apply("min.f32", a, b, result=np.uint32)
    np.testing.assert_array_equal(smallest, [0x3F800000, 0x40000000, NAN_BITS, 1 << 31, 1 << 31, 0xFF800000])
    np.testing.assert_array_equal(apply("max.NaN.f32", a, b, result=np.uint32)[:3], [NAN_BITS] * 3)


@pytest.mark.parametrize(
    ("opcode", "function"),
    [
        ("ex2.approx.f32", np.exp2),
        ("ex2.approx.ftz.f32", np.exp2),
        ("lg2.approx.f32", np.log2),
        ("rcp.approx.ftz.f32", np.reciprocal),
        ("sqrt.rn.f32", np.sqrt),
        ("rsqrt.approx.f32", lambda x: 1 / np.sqrt(x)),
        ("tanh.approx.f32", np.tanh),
        ("sin.approx.f32", np.sin),
        ("cos.approx.f32", np.cos),
    ],
)
def test_approximations_are_nearest(opcode: str, function: np.ufunc) -> None:
    x = np.concatenate([near(5), SPECIAL])
    with np.errstate(all="ignore"):
        flushes = "ftz" in opcode
        wanted = function(flushed(x, flushes).astype(np.float64)).astype(np.float32)
    np.testing.assert_array_equal(apply(opcode, x, result=np.float32), flushed(wanted, flushes))


def flushed(x: Array, flushes: bool) -> Array:
    return np.where(np.abs(x) < 2**-126, np.copysign(np.float32(0), x), x) if flushes else x


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_halves_are_rounded_once(kind: str) -> None:
    """Sums, products and fused ones of 16 bits, singly and in pairs."""
    shape = (3, 512)
    bits = np.random.default_rng(6).integers(0, 2**16, shape, dtype=np.uint16)
    a, b, c = (_numbers(bit, kind) for bit in bits)
    with np.errstate(invalid="ignore"):
        results = {"add": a + b, "mul": a * b, "fma": a * b + c}
    for opcode, exact in results.items():
        operands = [*bits[: 3 if opcode == "fma" else 2]]
        name = f"{opcode}.rn.{kind}"
        actual = apply(name, *operands, result=np.uint16)
        usable = np.isfinite(exact) & (np.abs(exact) < 6e4) & (np.abs(exact) > 2**-14)
        wanted = np.array([_nearest_half(float(x), kind) for x in exact[usable]], np.uint16)
        np.testing.assert_array_equal(actual[usable], wanted)
        words = [np.repeat(operand.astype(np.uint32), 1) | operand.astype(np.uint32) << 16 for operand in operands]
        pairs = apply(f"{name}x2", *words, result=np.uint32)
        np.testing.assert_array_equal(pairs, actual.astype(np.uint32) | actual.astype(np.uint32) << 16)


def _numbers(bits: Array, kind: str) -> Array:
    """fp64, in which sums and products of 16 bits that are used here are exact or rounded far below a tie."""
    if kind == "f16":
        return bits.view(np.float16).astype(np.float64)
    with np.errstate(invalid="ignore"):
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def _nearest_half(value: float, kind: str) -> int:
    """By trying all codes around the one that truncation gives."""
    start = int(np.float16(value).view(np.uint16)) if kind == "f16" else int(np.float32(value).view(np.uint32)) >> 16
    codes = np.array([start - 1, start, start + 1], np.uint16)
    distances = np.abs(_numbers(codes, kind) - value)
    return int(min(zip(distances, codes & 1, codes, strict=True))[2])


def test_conversions_to_16_and_8_bits() -> None:
    x = np.concatenate([near(7) * 300, SPECIAL, E4M3_NUMBERS[:127], [449, -1e9, 2**-10, 2**-11 * 3]]).astype(np.float32)
    pairs = apply("cvt.rn.bf16x2.f32", x, x[::-1].copy(), result=np.uint32)
    single = apply("cvt.rn.bf16.f32", x, result=np.uint16)
    np.testing.assert_array_equal(pairs, single.astype(np.uint32) << 16 | single[::-1])
    assert (single[np.isnan(x)] == NAN_HALF).all()
    half = apply("cvt.rn.f16.f32", x, result=np.uint16)
    with np.errstate(over="ignore"):
        wanted = x.astype(np.float16)
    np.testing.assert_array_equal(half[~np.isnan(x)], wanted.view(np.uint16)[~np.isnan(x)])
    codes = apply("cvt.rn.satfinite.e4m3x2.f32", x, x, result=np.uint16)
    np.testing.assert_array_equal(codes >> 8, codes & 255)
    back = E4M3_NUMBERS[codes & 255]
    clipped = np.clip(x, -448, 448)
    finite = ~np.isnan(x)
    gaps = np.abs(E4M3_NUMBERS[:127][:, None] - np.abs(clipped[finite])).min(axis=0)
    np.testing.assert_array_equal(np.abs(back[finite] - clipped[finite]), gaps)
    assert (codes[~finite] & 127 == 127).all()


def test_conversions_that_leave_nothing_below_zero_keep_a_nan() -> None:
    x = np.array([-1.5, 2.5, np.nan, -np.inf], np.float32)
    for kind, wanted in (("f16", 0x4100), ("bf16", 0x4020)):
        actual = apply(f"cvt.rn.relu.{kind}.f32", x, result=np.uint16)
        np.testing.assert_array_equal(actual, [0, wanted, NAN_HALF, 0])
        pairs = apply(f"cvt.rn.relu.{kind}x2.f32", x, x, result=np.uint32)
        np.testing.assert_array_equal(pairs, actual.astype(np.uint32) << 16 | actual)


def test_conversions_to_whole_numbers() -> None:
    x = np.array([2.5, -2.5, 3.5, 1e20, -1e20, np.nan, -0.5, 1e-40], np.float32)
    np.testing.assert_array_equal(
        apply("cvt.rni.s32.f32", x, result=np.int32), [2, -2, 4, 2**31 - 1, -(2**31), 0, 0, 0]
    )
    np.testing.assert_array_equal(apply("cvt.rzi.u32.f32", x, result=np.uint32), [2, 0, 3, 2**32 - 1, 0, 0, 0, 0])
    wide = np.array([2.5, np.nan], np.float64)
    np.testing.assert_array_equal(apply("cvt.rni.s32.f64", wide, result=np.int32), [2, -(2**31)])
    np.testing.assert_array_equal(apply("cvt.rmi.f32.f32", x, result=np.float32)[:3], [2, -3, 3])
    np.testing.assert_array_equal(apply("cvt.rpi.f32.f32", x, result=np.float32)[:3], [3, -2, 4])
    whole = np.array([2**31 - 1, -(2**31), 2**24 + 1, -7], np.int32)
    np.testing.assert_array_equal(apply("cvt.rn.f32.s32", whole, result=np.float32), whole.astype(np.float32))
    np.testing.assert_array_equal(apply("cvt.rn.bf16.s32", whole[2:], result=np.uint16), [0x4B80, 0xC0E0])
    signed = np.array([-1, 127, 300], np.int32)
    np.testing.assert_array_equal(apply("cvt.s8.s32", signed, result=np.int16), [-1, 127, 44])
    np.testing.assert_array_equal(apply("cvt.sat.s8.s32", signed, result=np.int16), [-1, 127, 127])
    np.testing.assert_array_equal(apply("cvt.s64.s32", signed, result=np.int64), signed)
    np.testing.assert_array_equal(apply("cvt.u64.u32", signed, result=np.uint64), signed.view(np.uint32))
