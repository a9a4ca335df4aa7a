"""Tensor maps: the 128 bytes that describe a tensor in global memory to bulk tensor copies.

The bits that a device keeps in them are not documented: the machine keeps the fields in its own layout. Dimension
0 is the one whose elements lie side by side.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

NBYTES = 128
_RANKS = 5
_LAYOUT = np.dtype(
    {
        "names": ["address", "stride", "dim", "box", "element_stride", "rank", "type", "swizzle", "fill", "set"],
        "formats": ["u8", ("u8", 4), ("u4", 5), ("u2", 5), ("u2", 5), "u1", "u1", "u1", "u1", "u4"],
        "offsets": [0, 8, 40, 60, 70, 80, 81, 82, 83, 84],
        "itemsize": NBYTES,
    }
)
# By the number that `elemtype` has.
_ELEMENT_BYTES = {0: 1, 1: 2, 2: 4, 3: 4, 4: 8, 5: 8, 6: 2, 7: 4, 8: 4, 9: 8, 10: 2, 11: 4, 12: 4}
# Bytes of a row in which runs of 16 change places, by the number that `swizzle_mode` has.
SWIZZLE_BYTES = {0: 0, 1: 32, 2: 64, 3: 128}
# The fields with a place for each dimension, then the others, with their bits in `set`.
_DIMENSIONED = {
    "box_dim": ("box", 0),
    "global_dim": ("dim", 5),
    "element_stride": ("element_stride", 10),
    "global_stride": ("stride", 15),
}
_SINGLE = {
    "global_address": ("address", 20),
    "rank": ("rank", 21),
    "elemtype": ("type", 22),
    "swizzle_mode": ("swizzle", 23),
    "fill_mode": ("fill", 24),
    "interleave_layout": (None, 25),
}
FIELDS = (*_DIMENSIONED, *_SINGLE)


@dataclass(frozen=True)
class TensorMap:
    """A tensor. dims, box: by dimension, the first one contiguous; strides: bytes, of dimensions 1 and on."""

    address: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_bytes: int
    swizzle_bytes: int

    @property
    def box_bytes(self) -> int:
        """Bytes of shared memory of a box."""
        return int(np.prod(self.box)) * self.element_bytes


def replace_field(octets: npt.NDArray[np.uint8], field: str, dimension: int, values: npt.NDArray[Any]) -> None:
    """Set a field of several maps [maps, 128] in place. dimension: 0 for fields that have none."""
    maps = octets.view(_LAYOUT)[:, 0]
    if field in _DIMENSIONED:
        name, bit = _DIMENSIONED[field]
        maps[name][:, dimension] = values
        maps["set"] |= np.uint32(1 << bit + dimension)
        return
    single, bit = _SINGLE[field]
    if single is not None:
        maps[single] = values
    maps["set"] |= np.uint32(1 << bit)


def read_map(octets: npt.NDArray[np.uint8]) -> TensorMap | str:
    """The map in 128 bytes, or what is wrong with it."""
    layout = octets.view(_LAYOUT)[0]
    rank = int(layout["rank"]) + 1
    is_set = int(layout["set"])
    needed = [("global_address", 20), ("rank", 21), ("elemtype", 22), ("swizzle_mode", 23)]
    for name, (_, bit) in _DIMENSIONED.items():
        needed += [(f"{name} {i}", bit + i) for i in range(rank - (name == "global_stride"))]
    missing = [name for name, bit in needed if not is_set >> bit & 1]
    if rank > _RANKS or missing:
        return f"it lacks {', '.join(missing)}" if missing else f"it has {rank} dimensions"
    element_bytes, swizzle = _ELEMENT_BYTES.get(int(layout["type"])), SWIZZLE_BYTES.get(int(layout["swizzle"]))
    if element_bytes is None or swizzle is None:
        return f"its elemtype is {int(layout['type'])} and its swizzle_mode {int(layout['swizzle'])}"
    if any(int(stride) != 1 for stride in layout["element_stride"][:rank]):
        return "it leaves elements out"
    tensor_map = TensorMap(
        int(layout["address"]),
        tuple(int(size) for size in layout["dim"][:rank]),
        tuple(int(stride) for stride in layout["stride"][: rank - 1]),
        tuple(int(size) for size in layout["box"][:rank]),
        element_bytes,
        swizzle,
    )
    return _problem(tensor_map) or tensor_map


def _problem(tensor_map: TensorMap) -> str | None:
    """The first violation of the manual's rules for a map."""
    inner = tensor_map.box[0] * tensor_map.element_bytes
    if tensor_map.address % 16 or any(stride % 16 for stride in tensor_map.strides):
        return f"address {tensor_map.address:#x} and strides {tensor_map.strides} are not multiples of 16 bytes"
    if any(not 1 <= size <= 256 for size in tensor_map.box) or any(size < 1 for size in tensor_map.dims):
        return f"its box is {tensor_map.box}, its tensor {tensor_map.dims}"
    if inner % 16 or (tensor_map.swizzle_bytes and inner > tensor_map.swizzle_bytes):
        return f"rows of its box have {inner} bytes, its swizzle {tensor_map.swizzle_bytes}"
    return None


def swizzled(offsets: npt.NDArray[np.intp], swizzle_bytes: int) -> npt.NDArray[np.intp]:
    """Return the places of bytes of shared memory whose rows have their runs of 16 exchanged: bits 4 to 6 of an address
    change by bits 7 to 9. swizzle_bytes: bytes of a row, 0 for no exchange."""
    if not swizzle_bytes:
        return offsets
    return offsets ^ (offsets >> 7 & swizzle_bytes // 16 - 1) << 4
