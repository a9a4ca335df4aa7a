"""Logic, shifts, fields of bits and permutations of bytes."""

import numpy as np

from llmc.ptx.access import Operands
from llmc.ptx.elementwise import Action, Chooser, Elementwise, applied
from llmc.ptx.lanes import BOOL, NUMPY_TYPES, SIGNED, U8, U32, U64, Values
from llmc.ptx.modifiers import Modifiers


def _logic(function: np.ufunc, of_bools: np.ufunc, count: int = 2) -> Chooser:
    def choose(modifiers: Modifiers) -> Elementwise:
        dtype = NUMPY_TYPES[modifiers.one_of("pred", "b16", "b32", "b64")]
        return Elementwise((dtype,) * count, dtype, of_bools if dtype is BOOL else function)

    return choose


def _shift_left(modifiers: Modifiers) -> Elementwise:
    """Shift left. A shift by at least the number of bits leaves 0."""
    dtype = NUMPY_TYPES[modifiers.one_of("b16", "b32", "b64")]
    most = np.uint32(8 * dtype.itemsize)
    return Elementwise((dtype, U32), dtype, lambda a, n: np.left_shift(a, np.minimum(n, most).astype(dtype)))


def _shift_right(modifiers: Modifiers) -> Elementwise:
    """Shift right. A shift by at least the number of bits leaves the sign, or 0."""
    dtype = NUMPY_TYPES[modifiers.one_of("b16", "b32", "b64", "u16", "u32", "u64", "s16", "s32", "s64")]
    most = np.uint32(8 * dtype.itemsize)
    return Elementwise((dtype, U32), dtype, lambda a, n: np.right_shift(a, np.minimum(n, most).astype(dtype)))


def _funnel(modifiers: Modifiers) -> Elementwise:
    """shf: 32 bits of two consecutive words."""
    direction, clamps = modifiers.one_of("l", "r"), modifiers.one_of("clamp", "wrap") == "clamp"
    modifiers.one_of("b32")

    def function(low: Values, high: Values, count: Values) -> Values:
        count = np.minimum(count, np.uint32(32)) if clamps else count & np.uint32(31)
        joined = high.astype(U64) << np.uint64(32) | low.astype(U64)
        moved: Values = joined >> count.astype(U64)
        if direction == "l":
            moved = joined << count.astype(U64) >> np.uint64(32)
        return moved.astype(U32)

    return Elementwise((U32, U32, U32), U32, function)


def _extract(modifiers: Modifiers) -> Elementwise:
    """bfe: `length` bits from `start` on; bits after the field and after the word are the field's sign if the type
    has one, else zeros."""
    dtype = NUMPY_TYPES[modifiers.one_of("u32", "s32", "u64", "s64")]
    bits = 8 * dtype.itemsize

    def function(a: Values, start: Values, length: Values) -> Values:
        begin, count = (start & np.uint32(255)).astype(np.int64), (length & np.uint32(255)).astype(np.int64)
        unsigned = a.view(U32 if bits == 32 else U64)
        moved = np.right_shift(unsigned, np.minimum(begin, bits).astype(unsigned.dtype))
        ones = np.left_shift(
            unsigned.dtype.type(1), np.minimum(count, bits).astype(unsigned.dtype)
        ) - unsigned.dtype.type(1)
        field: Values = moved & ones
        if dtype.kind == "u":
            return field
        last = np.minimum(begin + count - 1, bits - 1)
        sign = np.right_shift(unsigned, np.maximum(last, 0).astype(unsigned.dtype)) & unsigned.dtype.type(1)
        taken = np.minimum(count, np.maximum(bits - begin, 0)).astype(unsigned.dtype)
        above = ~(np.left_shift(unsigned.dtype.type(1), taken) - unsigned.dtype.type(1))
        filled: Values = np.where((sign != 0) & (count > 0), field | above, field)
        return filled.view(SIGNED[dtype.itemsize])

    return Elementwise((dtype, U32, U32), dtype, function)


def _insert(modifiers: Modifiers) -> Elementwise:
    """bfi: the lower bits of a, put into b."""
    dtype = NUMPY_TYPES[modifiers.one_of("b32", "b64")]
    bits = 8 * dtype.itemsize

    def function(a: Values, b: Values, start: Values, length: Values) -> Values:
        begin = np.minimum(start & np.uint32(255), bits).astype(dtype)
        count = np.minimum(length & np.uint32(255), bits).astype(dtype)
        ones = np.left_shift(np.left_shift(dtype.type(1), count) - dtype.type(1), begin)
        merged: Values = np.left_shift(a, begin) & ones | b & ~ones
        return merged

    return Elementwise((dtype, dtype, U32, U32), dtype, function)


def _count_ones(modifiers: Modifiers) -> Elementwise:
    dtype = NUMPY_TYPES[modifiers.one_of("b32", "b64")]
    return Elementwise((dtype,), U32, _ones)


def _ones(a: Values) -> Values:
    """Return the number of set bits, of 32 or 64."""
    octets = np.ascontiguousarray(a).view(U8).reshape(*a.shape, a.dtype.itemsize)
    count: Values = _ONES_OF_OCTETS[octets].sum(axis=-1, dtype=U32)
    return count


_ONES_OF_OCTETS = np.array([bin(octet).count("1") for octet in range(256)], np.uint8)


def _leading_zeros(modifiers: Modifiers) -> Elementwise:
    dtype = NUMPY_TYPES[modifiers.one_of("b32", "b64")]
    bits = 8 * dtype.itemsize
    steps = [dtype.type(1 << i) for i in range((bits - 1).bit_length())]

    def function(a: Values) -> Values:
        for step in steps:
            a = a | a >> step
        return np.uint32(bits) - _ones(a)

    return Elementwise((dtype,), U32, function)


def _reverse(modifiers: Modifiers) -> Elementwise:
    dtype = NUMPY_TYPES[modifiers.one_of("b32", "b64")]

    def function(a: Values) -> Values:
        octets = np.ascontiguousarray(a).view(U8).reshape(*a.shape, dtype.itemsize)
        bits = np.unpackbits(octets, axis=-1)[..., ::-1]
        return np.ascontiguousarray(np.packbits(bits, axis=-1)).view(dtype)[..., 0]

    return Elementwise((dtype,), dtype, function)


_PRMT_MODES = ("f4e", "b4e", "rc8", "ecl", "ecr", "rc16")


def _permute(modifiers: Modifiers) -> Elementwise:
    """prmt: each byte of the result is one of the eight of a and b, or its sign."""
    modifiers.one_of("b32")
    if modifiers.maybe(*_PRMT_MODES) is not None:
        raise modifiers.refused("the machine knows no modes of it")

    def function(a: Values, b: Values, selector: Values) -> Values:
        joined = b.astype(U64) << np.uint64(32) | a.astype(U64)
        result = np.zeros(1, U32)
        for place in range(4):
            choice = selector >> np.uint32(4 * place) & np.uint32(15)
            octet = (joined >> ((choice & np.uint32(7)) << np.uint32(3)).astype(U64)).astype(U32) & np.uint32(255)
            if (choice & np.uint32(8)).any():
                sign = np.where(octet & np.uint32(128), np.uint32(255), np.uint32(0))
                octet = np.where(choice & np.uint32(8), sign, octet)
            result = result | octet << np.uint32(8 * place)
        return result

    return Elementwise((U32, U32, U32), U32, function)


def build_lop3(operands: Operands, modifiers: Modifiers) -> Action:
    """lop3: any function of three bits, as a table of eight."""
    modifiers.one_of("b32")
    modifiers.finish()
    operands.count(5)
    table = operands.number(4)

    def function(a: Values, b: Values, c: Values) -> Values:
        result = np.zeros(1, U32)
        for entry in range(8):
            if table >> entry & 1:
                parts = (v if entry & bit else ~v for v, bit in ((a, 4), (b, 2), (c, 1)))
                first, second, third = parts
                result = result | first & second & third
        return result

    return applied(operands, Elementwise((U32, U32, U32), U32, function))


BITS: dict[str, Chooser] = {
    "and": _logic(np.bitwise_and, np.logical_and),
    "bfe": _extract,
    "bfi": _insert,
    "brev": _reverse,
    "clz": _leading_zeros,
    "not": _logic(np.invert, np.logical_not, 1),
    "or": _logic(np.bitwise_or, np.logical_or),
    "popc": _count_ones,
    "prmt": _permute,
    "shf": _funnel,
    "shl": _shift_left,
    "shr": _shift_right,
    "xor": _logic(np.bitwise_xor, np.logical_xor),
}
