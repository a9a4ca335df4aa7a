"""Values of all threads of some blocks, as numpy arrays that broadcast to [blocks, threads].

An axis has length 1 where its threads, or its blocks, all have the same value: values that depend only on the thread's
number are computed for one block, and values that depend only on the block's for one thread. A mask says which threads
an instruction is executed by; None is all of them.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[Any]
Bools = npt.NDArray[np.bool_]
Mask = Bools | None

BOOL = np.dtype(np.bool_)
U8, U16, U32, U64 = (np.dtype(f"uint{bits}") for bits in (8, 16, 32, 64))
S8, S16, S32, S64 = (np.dtype(f"int{bits}") for bits in (8, 16, 32, 64))
F16, F32, F64 = (np.dtype(f"float{bits}") for bits in (16, 32, 64))

# The numpy type that holds a PTX type; numbers of two bytes that numpy has no arithmetic for are bits.
NUMPY_TYPES: dict[str, np.dtype[Any]] = {
    "pred": BOOL,
    "b8": U8,
    "u8": U8,
    "s8": S8,
    "b16": U16,
    "u16": U16,
    "s16": S16,
    "f16": F16,
    "bf16": U16,
    "b32": U32,
    "u32": U32,
    "s32": S32,
    "f32": F32,
    "f16x2": U32,
    "bf16x2": U32,
    "u16x2": U32,
    "s16x2": U32,
    "tf32": U32,
    "b64": U64,
    "u64": U64,
    "s64": S64,
    "f64": F64,
}
UNSIGNED: dict[int, np.dtype[Any]] = {1: U8, 2: U16, 4: U32, 8: U64}
SIGNED: dict[int, np.dtype[Any]] = {1: S8, 2: S16, 4: S32, 8: S64}

_NAN = np.uint32(0x7FFFFFFF)
_NAN_HALF = np.uint16(0x7FFF)


def constant(value: int, dtype: np.dtype[Any]) -> Values:
    """A number as the value of every thread; its bits, cut to the type's size."""
    bits = value % (1 << 8 * dtype.itemsize)
    return np.frombuffer(bits.to_bytes(dtype.itemsize, "little"), dtype).reshape(1, 1)


def as_type(value: Values, dtype: np.dtype[Any]) -> Values:
    """A register's bits as another type of the same size.

    A NaN that arithmetic made has one pattern of bits in PTX, and another in numpy: it is put right where arithmetic
    ends and bits begin.
    """
    if value.dtype is dtype:
        return value
    if value.dtype.kind == "f" and dtype.kind != "f":
        value = canonical(value)
    return value.view(dtype)


def canonical(value: Values) -> Values:
    """The bits of floats, every NaN of 16 and 32 bits with the pattern that PTX gives it."""
    if value.dtype is F64:
        return value.view(U64)
    bits = value.view(UNSIGNED[value.dtype.itemsize])
    is_nan = np.isnan(value)
    return np.where(is_nan, _NAN if value.dtype is F32 else _NAN_HALF, bits) if is_nan.any() else bits


def select(mask: Bools, chosen: Values, others: Values) -> Values:
    """chosen where the mask is set, others elsewhere: bits of the same size."""
    if mask.size == 1:
        return chosen if mask.flat[0] else others
    if chosen.dtype is not others.dtype:
        unsigned = UNSIGNED[chosen.dtype.itemsize]
        chosen, others = as_type(chosen, unsigned), as_type(others, unsigned)
    return np.where(mask, chosen, others)


def both(mask: Mask, other: Bools) -> Bools:
    """The threads of the mask for which `other` is set."""
    return other if mask is None else mask & other


def whole(mask: Mask, shape: tuple[int, ...]) -> Bools:
    """The mask with an element for each thread."""
    return np.ones(shape, np.bool_) if mask is None else np.broadcast_to(mask, shape)
