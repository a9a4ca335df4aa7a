"""The 64 bits that describe a matrix in shared memory to wgmma, and the places of its elements (layouts of the PTX
manual).

A matrix consists of runs of 16 bytes along its leading dimension, which is K, or M or N of a transposed matrix. Rows
have the swizzle's number of bytes and are consecutive; eight rows make an atom. The distance between atoms is a stride,
in the direction that the other stride does not cover; without a swizzle both strides are used.

    bits 0-13   address / 16            bits 32-45  stride dimension's byte offset / 16
    bits 16-29  leading dimension's     bits 49-51  base offset
                byte offset / 16        bits 62-63  swizzle: 0 none, 1 of 128 bytes, 2 of 64, 3 of 32
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llmc.ptx.tensor_map import swizzled

Offsets = npt.NDArray[np.int64]

CHUNK = 16
_SWIZZLES = (0, 128, 64, 32)


@dataclass(frozen=True)
class MatrixDescriptor:
    """The descriptor of a matrix in shared memory. leading, stride: byte offsets. base_offset: the offset of a pattern
    that does not begin at a multiple of its size."""

    address: int
    leading: int
    stride: int
    base_offset: int
    swizzle_bytes: int

    @staticmethod
    def from_bits(bits: int) -> "MatrixDescriptor":
        """Read the 64 bits."""
        address, leading, stride = ((bits >> shift & 0x3FFF) * CHUNK for shift in (0, 16, 32))
        return MatrixDescriptor(address, leading, stride, bits >> 49 & 7, _SWIZZLES[bits >> 62 & 3])


def chunk_offsets(
    leading: int, stride: int, swizzle_bytes: int, rows: int, row_bytes: int, is_transposed: bool
) -> Offsets:
    """Return the offsets of a matrix's runs of 16 bytes from its address, before the swizzle.

    Args:
        leading: byte offset of the leading dimension.
        stride: byte offset of the other.
        swizzle_bytes: 0, 32, 64 or 128.
        rows: rows of the matrix along M or N; transposed, along K.
        row_bytes: bytes of a row, along K; transposed, along M or N.
        is_transposed: whether M or N is the dimension along which elements lie side by side.

    Returns:
        [rows, row_bytes / 16].
    """
    row, chunk = np.arange(rows)[:, None], np.arange(row_bytes // CHUNK)[None, :]
    inner, outer = row % 8, row // 8
    if not swizzle_bytes:
        return inner * CHUNK + (outer * leading + chunk * stride if is_transposed else outer * stride + chunk * leading)
    per_atom = swizzle_bytes // CHUNK
    return inner * swizzle_bytes + outer * stride + chunk % per_atom * CHUNK + chunk // per_atom * leading


def chunk_addresses(starts: Offsets, offsets: Offsets, swizzle_bytes: int) -> Offsets:
    """[matrices, rows, chunks]: the addresses in shared memory. starts: the start address of each matrix."""
    return swizzled(starts[:, None, None] + offsets, swizzle_bytes)
