"""The element types of matrix instructions: how words become numbers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from llmc.ptx.lanes import F32, Values
from llmc.ptx.rounding import E4M3_NUMBERS, E5M2_NUMBERS, f32_of_bf16


@dataclass(frozen=True)
class ElementType:
    """A floating-point type of matrix elements. bits: as numpy holds an element's bits. number: single precision of
    them, which is exact."""

    bits: np.dtype[Any]
    number: Callable[[Values], Values]

    @property
    def per_word(self) -> int:
        """The number of elements in 32 bits."""
        return 4 // self.bits.itemsize

    def of_words(self, words: npt.NDArray[Any]) -> Values:
        """[..., E] numbers of 32-bit words [...]."""
        parts = np.ascontiguousarray(words).view(self.bits).reshape(*words.shape, self.per_word)
        return self.number(parts)


def _tf32(bits: Values) -> Values:
    """The lower 13 bits are not read."""
    return (bits & np.uint32(0xFFFFE000)).view(F32)


ELEMENT_TYPES: Mapping[str, ElementType] = MappingProxyType(
    {
        "bf16": ElementType(np.dtype("u2"), f32_of_bf16),
        "f16": ElementType(np.dtype("f2"), lambda value: value.astype(F32)),
        "tf32": ElementType(np.dtype("u4"), _tf32),
        "s8": ElementType(np.dtype("i1"), lambda value: value.astype(F32)),
        "u8": ElementType(np.dtype("u1"), lambda value: value.astype(F32)),
        "e4m3": ElementType(np.dtype("u1"), lambda bits: E4M3_NUMBERS[bits]),
        "e5m2": ElementType(np.dtype("u1"), lambda bits: E5M2_NUMBERS[bits]),
    }
)
WHOLE_TYPES = ("s8", "u8")


def sum_of_products(a: Values, b: Values, c: Values, is_whole: bool, saturates: bool) -> Values:
    """a · b + c of matrices.

    Products are exact in single precision, and so are sums of up to 32 products of bytes. Floats are summed in single
    precision, in an order that the manual leaves to the device.
    """
    product = a @ b
    if not is_whole:
        return product + c
    total = product.astype(np.int64) + c
    return (np.clip(total, -(2**31), 2**31 - 1) if saturates else total).astype(np.int32)
