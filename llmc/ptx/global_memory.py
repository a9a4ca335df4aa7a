"""The buffers that a launch may touch, at the addresses that its pointers have."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from llmc.ptx.errors import PtxError
from llmc.ptx.finding import Check

Bytes = npt.NDArray[np.uint8]
Addresses = npt.NDArray[np.int64]
Indices = npt.NDArray[np.intp]

_ALIGNMENT = 16
# The numpy dtype of an access, by its bytes.
WORDS: dict[int, np.dtype[Any]] = {
    nbytes: np.dtype(name) for nbytes, name in ((1, "u1"), (2, "u2"), (4, "u4"), (8, "u8"), (16, "c16"))
}


@dataclass(frozen=True, eq=False)
class Buffer:
    """A run of memory that a launch may touch.

    address: where pointers find it, a multiple of 16. data: its bytes. is_writable: whether the launch may store there.
    may_change: whether an earlier launch may still write it, so that `griddepcontrol.wait` must come before a load.
    written: for each byte whether it has a value, None if all have; stores set it.
    """

    name: str
    address: int
    data: Bytes
    is_writable: bool = True
    may_change: bool = True
    written: Bytes | None = None
    _views: dict[tuple[bool, int], npt.NDArray[Any]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.address % _ALIGNMENT:
            raise PtxError(
                f"the buffer {self.name} is at {self.address:#x}, which is not a multiple of {_ALIGNMENT}",
                at=self.name,
                fix="place buffers where a device's allocator places them",
            )

    @property
    def end(self) -> int:
        """The address after its last byte."""
        return self.address + len(self.data)

    def words(self, nbytes: int) -> npt.NDArray[Any]:
        """The data as elements of `nbytes` bytes; a remainder is left out."""
        return self._view(False, self.data, nbytes)

    def marks(self, nbytes: int) -> npt.NDArray[Any]:
        """`written` in the same way."""
        assert self.written is not None
        return self._view(True, self.written, nbytes)

    def _view(self, of_marks: bool, data: Bytes, nbytes: int) -> npt.NDArray[Any]:
        if (of_marks, nbytes) not in self._views:
            self._views[of_marks, nbytes] = data[: len(data) // nbytes * nbytes].view(WORDS[nbytes])
        return self._views[of_marks, nbytes]


# Tells of a fault: its kind, what it is, and the places in the access that have it.
Tell = Callable[[Check, str, Indices], None]


class GlobalMemory:
    """All buffers of a launch; they do not overlap."""

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self._buffers = sorted(buffers, key=lambda buffer: buffer.address)
        self._starts = [buffer.address for buffer in self._buffers]
        for buffer, following in zip(self._buffers, self._buffers[1:], strict=False):
            if buffer.end > following.address:
                raise PtxError(
                    f"the buffers {buffer.name} and {following.name} overlap at {following.address:#x}",
                    at=buffer.name,
                    fix="give the launch each run of memory once",
                )

    def find(self, address: int) -> Buffer | None:
        """The buffer that contains an address; None if none does."""
        place = bisect_right(self._starts, address) - 1
        buffer = self._buffers[place] if place >= 0 else None
        return buffer if buffer is not None and address < buffer.end else None

    def parts(self, addresses: Addresses, nbytes: int, tell: Tell) -> Iterator[tuple[Buffer, Indices | slice, Indices]]:
        """The buffers that accesses of `nbytes` bytes go to, the indices of these accesses, and the index of each among
        the buffer's elements of that size. Invalid accesses are reported and left out."""
        if not addresses.size:
            return
        low, high = int(addresses.min()), int(addresses.max())
        first = self.find(low)
        is_aligned = not int(np.bitwise_or.reduce(addresses)) & nbytes - 1
        shift = nbytes.bit_length() - 1
        if first is not None and is_aligned and high + nbytes <= first.end:
            yield first, slice(None), (addresses - first.address) >> shift
            return
        odd = np.flatnonzero(addresses & nbytes - 1)
        if len(odd):
            tell(Check.ALIGNMENT, f"{int(addresses[odd[0]]):#x} is not a multiple of {nbytes}", odd)
        left = np.flatnonzero((addresses & nbytes - 1) == 0)
        while len(left):
            lowest = int(addresses[left].min())
            buffer = self.find(lowest)
            if buffer is None:
                later = [start for start in self._starts if start > lowest]
                outside = left[addresses[left] < (later[0] if later else high + 1)]
                tell(Check.BOUNDS, f"{self._place_of(lowest)} is in no buffer", outside)
                left = np.setdiff1d(left, outside)
                continue
            ours = left[addresses[left] < buffer.end]
            fits = addresses[ours] + nbytes <= buffer.end
            if not fits.all():
                tell(
                    Check.BOUNDS, f"{nbytes} bytes begin before the end of {buffer.name} and end behind it", ours[~fits]
                )
            if fits.any():
                yield buffer, ours[fits], (addresses[ours[fits]] - buffer.address) >> shift
            left = np.setdiff1d(left, ours)

    def _place_of(self, address: int) -> str:
        """Describe an address by its distance from a buffer."""
        place = bisect_right(self._starts, address) - 1
        if place < 0:
            return f"{address:#x}"
        before = self._buffers[place]
        return f"{address:#x}, {address - before.end} bytes after the end of {before.name},"
