"""Whole numbers and bits against Python's own, which have no ends."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.ptx.ptx_text import Array, apply, kernel_text, run_text

EDGES = [0, 1, 2, 3, 7, 31, 32, 33, 63, 64, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1]


def words(seed: int, dtype: type, count: int = 300) -> Array:
    """Numbers of all sizes, and those where something ends."""
    bits = 8 * np.dtype(dtype).itemsize
    drawn = [int(x) >> int(s) for x, s in np.random.default_rng(seed).integers(0, [2**62, bits], (count, 2))]
    edges = [x for x in EDGES for _ in EDGES] if seed % 2 else EDGES * len(EDGES)
    return np.array([x % 2**bits for x in drawn + edges], np.uint64).astype(f"u{bits // 8}").view(dtype)


def _signed(value: int, bits: int) -> int:
    return value - (value >> bits - 1 << bits)


Function = Callable[..., int]
CASES: list[tuple[str, type, type, Function]] = [
    ("add.s32", np.int32, np.int32, lambda a, b: a + b),
    ("sub.s64", np.int64, np.int64, lambda a, b: a - b),
    ("mul.lo.s32", np.int32, np.int32, lambda a, b: a * b),
    ("mul.hi.s32", np.int32, np.int32, lambda a, b: a * b >> 32),
    ("mul.hi.u32", np.uint32, np.uint32, lambda a, b: a * b >> 32),
    ("mul.hi.s64", np.int64, np.int64, lambda a, b: a * b >> 64),
    ("mul.hi.u64", np.uint64, np.uint64, lambda a, b: a * b >> 64),
    ("mul.wide.s32", np.int32, np.int64, lambda a, b: a * b),
    ("mul.wide.u16", np.uint16, np.uint32, lambda a, b: a * b),
    ("min.s64", np.int64, np.int64, min),
    ("max.u32", np.uint32, np.uint32, max),
    ("max.relu.s32", np.int32, np.int32, lambda a, b: max(a, b, 0)),
    ("min.relu.s32", np.int32, np.int32, lambda a, b: max(min(a, b), 0)),
    ("and.b32", np.uint32, np.uint32, lambda a, b: a & b),
    ("xor.b64", np.uint64, np.uint64, lambda a, b: a ^ b),
    ("or.b16", np.uint16, np.uint16, lambda a, b: a | b),
]


@pytest.mark.parametrize(("opcode", "given", "result", "function"), CASES, ids=lambda value: str(value)[:12])
def test_two_operands(opcode: str, given: type, result: type, function: Function) -> None:
    a, b = words(0, given), words(1, given)
    bits = 8 * np.dtype(result).itemsize
    wanted = [function(int(x), int(y)) % 2**bits for x, y in zip(a, b, strict=True)]
    np.testing.assert_array_equal(apply(opcode, a, b, result=f"u{bits // 8}"), np.array(wanted, f"u{bits // 8}"))


def test_quotients_are_cut_towards_zero() -> None:
    a, b = np.array([7, -7, 7, -7, 2**31 - 1], np.int32), np.array([2, 2, -2, -2, 3], np.int32)
    np.testing.assert_array_equal(apply("div.s32", a, b, result=np.int32), [3, -3, -3, 3, 715827882])
    np.testing.assert_array_equal(apply("rem.s32", a, b, result=np.int32), [1, -1, 1, -1, 1])
    np.testing.assert_array_equal(apply("div.u32", a, b, result=np.uint32)[:2], [3, (2**32 - 7) // 2])


@pytest.mark.parametrize(
    ("opcode", "given"),
    [
        ("shl.b32", np.uint32),
        ("shl.b16", np.uint16),
        ("shr.u64", np.uint64),
        ("shr.s32", np.int32),
        ("shr.s16", np.int16),
    ],
)
def test_shifts_by_any_number(opcode: str, given: type) -> None:
    a, n = words(0, given), words(1, np.uint32)
    bits = 8 * np.dtype(given).itemsize
    pairs = [(int(x), min(int(s), bits)) for x, s in zip(a, n, strict=True)]
    moved = [x << s if opcode.startswith("shl") else x >> s for x, s in pairs]
    actual = apply(opcode, a, n, result=f"u{bits // 8}")
    np.testing.assert_array_equal(actual, np.array([x % 2**bits for x in moved], f"u{bits // 8}"))


def test_fields_of_bits() -> None:
    a, start, length = words(0, np.uint32), words(1, np.uint32) % 40, words(3, np.uint32) % 40
    fields = [(int(x), int(s), int(n)) for x, s, n in zip(a, start, length, strict=True)]
    unsigned = [x >> s & (1 << n) - 1 for x, s, n in fields]
    np.testing.assert_array_equal(apply("bfe.u32", a, start, length, result=np.uint32), np.array(unsigned, np.uint32))
    signed = [_signed_field(*field) for field in fields]
    np.testing.assert_array_equal(apply("bfe.s32", a, start, length, result=np.uint32), np.array(signed, np.uint32))
    b = words(2, np.uint32)
    inserted = []
    for x, y, s, n in zip(a, b, start, length, strict=True):
        ones = (1 << int(n)) - 1 << int(s)
        inserted.append((int(x) << int(s) & ones | int(y) & ~ones) % 2**32)
    packed_fields = apply("bfi.b32", a, b, start, length, result=np.uint32)
    np.testing.assert_array_equal(packed_fields, np.array(inserted, np.uint32))


def _signed_field(x: int, start: int, length: int) -> int:
    """bfe.s32 as the PTX manual spells it, bit by bit."""
    sign = x >> min(start + length - 1, 31) & 1 if length else 0
    bits = [x >> start + i & 1 if i < length and start + i <= 31 else sign for i in range(32)]
    return sum(bit << i for i, bit in enumerate(bits))


def test_counts_and_permutations() -> None:
    a, b, c = words(0, np.uint32), words(1, np.uint32), words(2, np.uint32)
    np.testing.assert_array_equal(apply("popc.b32", a, result=np.uint32), [int(x).bit_count() for x in a])
    np.testing.assert_array_equal(apply("clz.b32", a, result=np.uint32), [32 - int(x).bit_length() for x in a])
    np.testing.assert_array_equal(apply("brev.b32", a, result=np.uint32), [int(f"{int(x):032b}"[::-1], 2) for x in a])
    permuted = [_permuted(int(x) | int(y) << 32, int(s)) for x, y, s in zip(a, b, c, strict=True)]
    np.testing.assert_array_equal(apply("prmt.b32", a, b, c, result=np.uint32), np.array(permuted, np.uint32))
    turned = [(int(y) << 32 | int(x)) << (int(n) & 31) >> 32 & 0xFFFFFFFF for x, y, n in zip(a, b, c, strict=True)]
    np.testing.assert_array_equal(apply("shf.l.wrap.b32", a, b, c, result=np.uint32), np.array(turned, np.uint32))


def _permuted(both: int, selector: int) -> int:
    """The bytes that a selector names, or their signs."""
    word = 0
    for place in range(4):
        choice = selector >> 4 * place & 15
        octet = both >> 8 * (choice & 7) & 255
        word |= (255 * (octet >> 7) if choice & 8 else octet) << 8 * place
    return word


@pytest.mark.parametrize("table", [0xEA, 0x96, 0x1B])
def test_any_function_of_three_bits(table: int) -> None:
    body = """
    mad.wide.u32 %d1, %r_tid, 16, %d_x;
    ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%d1];
    lop3.b32 %r4, %r1, %r2, %r3, TABLE;
    st.global.b32 [%d1+12], %r4;
    """
    x = np.random.default_rng(0).integers(0, 2**32, (32, 4), dtype=np.uint32)
    a, b, c = (x[:, i].copy() for i in range(3))
    assert not run_text(kernel_text(body.replace("TABLE", str(table)), ["x"]), {"x": x}).findings
    wanted = np.zeros(32, np.uint32)
    for bit in range(32):
        index = (a >> bit & 1) << 2 | (b >> bit & 1) << 1 | (c >> bit & 1)
        wanted |= (np.uint32(table) >> index & 1) << np.uint32(bit)
    np.testing.assert_array_equal(x[:, 3], wanted)


def test_carries_go_from_one_product_to_the_next() -> None:
    """mad.lo.cc and madc.hi, as sines of huge angles have them."""
    body = """
    mad.wide.u32 %d1, %r_tid, 16, %d_x;
    ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%d1];
    mad.lo.cc.u32 %r5, %r1, %r2, %r3;
    madc.hi.u32 %r6, %r1, %r2, 0;
    st.global.v2.b32 [%d1], {%r5, %r6};
    """
    x = np.random.default_rng(1).integers(0, 2**32, (32, 4), dtype=np.uint32)
    wanted = [int(a) * int(b) + int(c) for a, b, c, _ in x]
    assert not run_text(kernel_text(body, ["x"]), {"x": x}).findings
    sums = np.ascontiguousarray(x[:, :2]).view(np.uint64)[:, 0]
    np.testing.assert_array_equal(sums, np.array(wanted, np.uint64))


ORDERINGS = [("lt", "1000"), ("ltu", "1001"), ("ne", "1010"), ("neu", "1011"), ("num", "1110"), ("nan", "0001")]


@pytest.mark.parametrize(("name", "wanted"), ORDERINGS)
def test_comparisons_of_floats(name: str, wanted: str) -> None:
    body = """
    mad.wide.u32 %d1, %r_tid, 8, %d_x;
    ld.global.v2.b32 {%r1, %r2}, [%d1];
    setp.NAME.f32 %p1|%p2, %r1, %r2;
    selp.b32 %r1, 1, 0, %p1;
    selp.b32 %r2, 1, 0, %p2;
    st.global.v2.b32 [%d1], {%r1, %r2};
    """
    x = np.resize(np.array([[1, 2], [2, 2], [3, 2], [np.nan, 2]], np.float32), (32, 2))
    assert not run_text(kernel_text(body.replace("NAME", name), ["x"]), {"x": x}).findings
    np.testing.assert_array_equal(x.view(np.int32)[:4], [[int(flag), 1 - int(flag)] for flag in wanted])
