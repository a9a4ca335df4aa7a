"""Shared memory of a team's blocks, in rows, with the checks of every access."""

from typing import Any

import numpy as np
import numpy.typing as npt

from llmc.ptx.finding import Check
from llmc.ptx.global_memory import WORDS
from llmc.ptx.lanes import Mask, Values
from llmc.ptx.module import Instruction
from llmc.ptx.order import Order
from llmc.ptx.shadow import Indices, Shadow, Tell

# Where a block's shared memory begins, as on devices whose drivers keep the first kilobyte.
SHARED_BASE = 1024
_ROW_ALIGNMENT = 1024


class SharedMemory:
    """The shared memory of blocks. nbytes: bytes per block. granule: the least number of bytes that an instruction of
    the kernel touches."""

    def __init__(self, blocks: int, threads: int, nbytes: int, granule: int, order: Order, tell: Tell) -> None:
        self.nbytes, self._threads, self._tell = nbytes, threads, tell
        self.row_bytes = -(-max(nbytes, 1) // _ROW_ALIGNMENT) * _ROW_ALIGNMENT
        self._hold(np.zeros(blocks * self.row_bytes, np.uint8))
        self.shadow = Shadow(blocks, self.row_bytes, granule, order, tell)

    def _hold(self, data: npt.NDArray[np.uint8]) -> None:
        self.data = data
        self._words: dict[int, npt.NDArray[Any]] = {}

    def take(self, rows: Indices, order: Order, tell: Tell) -> "SharedMemory":
        """The shared memory of some of the blocks."""
        part = SharedMemory(0, self._threads, self.nbytes, self.shadow.granule, order, tell)
        part._hold(np.ascontiguousarray(self.data.reshape(-1, self.row_bytes)[rows]).reshape(-1))
        part.shadow = self.shadow.take(rows, order, tell)
        return part

    def words(self, nbytes: int) -> npt.NDArray[Any]:
        """The whole memory as elements of `nbytes` bytes."""
        if nbytes not in self._words:
            self._words[nbytes] = self.data.view(WORDS[nbytes])
        return self._words[nbytes]

    def locate(
        self, addresses: npt.NDArray[np.int64], lanes: Indices, nbytes: int, at: Instruction
    ) -> tuple[Indices, Indices, Mask]:
        """The beginning of each lane's access of `nbytes` bytes in `data`, and the lanes; invalid accesses are reported
        and left out. The mask selects the remaining lanes; None for all.

        addresses: one for each lane.
        """
        offsets = addresses - SHARED_BASE
        rows = lanes // self._threads * self.row_bytes
        is_aligned = not int(np.bitwise_or.reduce(addresses, initial=0)) & nbytes - 1
        inside = offsets.min(initial=0) >= 0 and offsets.max(initial=0) + nbytes <= self.nbytes
        if is_aligned and (inside or not len(lanes)):
            return rows + offsets, lanes, None
        odd = (addresses & nbytes - 1) != 0
        outside = (offsets < 0) | (offsets + nbytes > self.nbytes)
        for check, wrong, problem in (
            (Check.ALIGNMENT, odd, f"no multiple of {nbytes}"),
            (Check.BOUNDS, outside, f"not within the {self.nbytes} bytes of shared memory"),
        ):
            if wrong.any():
                self._tell(check, f"shared memory at byte {int(offsets[wrong][0])} is {problem}", lanes[wrong], at)
        good = ~odd & ~outside
        return (rows + offsets)[good], lanes[good], good

    def load(self, index: Indices, nbytes: int) -> Values:
        """The words that begin at each index."""
        values: Values = self.words(nbytes).take(index >> nbytes.bit_length() - 1)
        return values

    def store(self, index: Indices, nbytes: int, words: Values) -> None:
        """Write a word at each index."""
        self.words(nbytes)[index >> nbytes.bit_length() - 1] = words

    def store_checked(self, index: Indices, nbytes: int, lanes: Indices, words: Values, at: Instruction) -> None:
        """Write a word per thread, and report races. lanes: the threads, in order.

        Several threads may write the same word to one place in one instruction: a reduction, or a layout that repeats
        values, leaves the word with all of them.
        """
        lost, winners = self.shadow.write(index, nbytes, lanes, at)
        self.store(index, nbytes, words)
        if not len(lost):
            return
        kept, own = (
            np.ascontiguousarray(w).view(np.uint8).reshape(-1, nbytes)
            for w in (self.load(index[lost], nbytes), words[lost])
        )
        are_alike = (kept == own).all(axis=1)
        if not are_alike.all():
            other = lanes[lost][~are_alike]
            self._tell(Check.RACE, "another thread writes there in the same instruction", other, at)
        in_warp = are_alike & (winners >> 5 == lanes[lost] >> 5)
        self.shadow.sign_for_warps(index[lost][in_warp], nbytes, lanes[lost][in_warp])
