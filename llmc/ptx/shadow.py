"""The last accesses to each byte of shared memory, for finding races, missing waits and missing fences.

For each granule (the smallest access that a kernel has) of each block there is the stamp (order.py) of its last writer,
and for each warp the stamp of its last reader in that warp. An access is in order if what it meets has been seen by the
warp that makes it. Most accesses meet only what the last barrier of the whole block has settled, which one comparison
shows; only others are checked one by one.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from llmc.ptx.finding import Check
from llmc.ptx.module import Instruction
from llmc.ptx.order import CODE_BITS, CODES, MBARRIER_CODE, PENDING, PENDING_EPOCH, WARP_CODE, Order, Stamps

Indices = npt.NDArray[np.intp]
_NO_PLACES = np.zeros(0, np.intp)
# Tells of a fault: its kind, what it is, and the threads that have it.
Tell = Callable[[Check, str, Indices, Instruction], None]


class Shadow:
    """The shadow of a team's blocks. granule: bytes; nbytes: shared memory of a block. Lanes number the threads of the
    team, row by row."""

    def __init__(self, blocks: int, nbytes: int, granule: int, order: Order, tell: Tell) -> None:
        self.granule, self._order, self._tell = granule, order, tell
        self._per_block = nbytes // granule
        self._hold(
            np.zeros((blocks, self._per_block), np.int32), np.zeros((order.warps, blocks, self._per_block), np.int32)
        )

    def _hold(self, writes: Stamps, reads: Stamps) -> None:
        self._writes, self._reads = writes, reads
        self._views: dict[tuple[bool, int], npt.NDArray[Any]] = {}

    def take(self, rows: Indices, order: Order, tell: Tell) -> "Shadow":
        """The shadow of some of the blocks."""
        part = Shadow(0, self._per_block * self.granule, self.granule, order, tell)
        part._hold(self._writes[rows], np.ascontiguousarray(self._reads[:, rows]))
        return part

    # ---- accesses of threads -----------------------------------------------------------------------------------------

    def read(self, index: Indices, nbytes: int, lanes: Indices, at: Instruction, whole_warp: bool = False) -> None:
        """Check and record that threads read `nbytes` bytes, each from its index. whole_warp: also for the other
        threads of their warps."""
        self._check_writes(index, nbytes, lanes, at, is_read=True, by_warp=whole_warp)
        self._sign_reads(index, nbytes, lanes, self._signatures(lanes, whole_warp), whole_warp)

    def write(
        self, index: Indices, nbytes: int, lanes: Indices, at: Instruction, whole_warp: bool = False
    ) -> tuple[Indices, Indices]:
        """Threads write `nbytes` bytes, each at its index.

        Returns the places of threads that are not the last to write their bytes, and the lanes of those that are.
        """
        self._check_overwrite(index, nbytes, lanes, at, by_warp=whole_warp)
        stamps = self._signatures(lanes, whole_warp)
        self._sign(index, nbytes, stamps)
        if whole_warp:
            return _NO_PLACES, _NO_PLACES
        latest = self._written_by(index, nbytes)[:, 0]
        lost = np.flatnonzero(latest != stamps)
        rows = lanes[lost] // self._order.threads
        return lost, rows * self._order.threads + (latest[lost] & CODES - 1)

    def sign_for_warps(self, index: Indices, nbytes: int, lanes: Indices) -> None:
        """Record as the warp's what several threads of a warp have written at the same place."""
        self._sign(index, nbytes, self._signatures(lanes, True))

    # ---- asynchronous operations -------------------------------------------------------------------------------------

    def begin_write(self, index: Indices, nbytes: int, lanes: Indices, at: Instruction) -> None:
        """Threads let bytes be copied there; `end_write` is when they have waited for it."""
        self._check_overwrite(index, nbytes, lanes, at)
        self._sign(index, nbytes, PENDING + (lanes % self._order.threads).astype(np.int32))

    def end_write(self, index: Indices, nbytes: int, lanes: Indices) -> None:
        """The copies have ended, and the threads that began them know it."""
        self._sign(index, nbytes, self._signatures(lanes, False))

    def begin_bulk_write(
        self, index: Indices, nbytes: int, lanes: Indices, mbarriers: Indices, at: Instruction
    ) -> None:
        """Begin a write as begin_write does, by the asynchronous proxy: each thread's mbarrier tells when it has
        ended."""
        self._check_overwrite(index, nbytes, lanes, at, by_proxy=True)
        self._sign(index, nbytes, PENDING + (MBARRIER_CODE + mbarriers).astype(np.int32))

    def end_bulk_write(self, index: Indices, nbytes: int, stamps: Stamps) -> None:
        """Record that a phase of an mbarrier has completed the bulk writes."""
        self._sign(index, nbytes, stamps)

    def begin_proxy_read(self, index: Indices, nbytes: int, lanes: Indices, at: Instruction) -> None:
        """The asynchronous proxy reads for the threads' warps, until `end_proxy_read`."""
        self._check_writes(index, nbytes, lanes, at, is_read=True, by_proxy=True)
        warps = (lanes % self._order.threads >> 5).astype(np.int32)
        self._put(True, nbytes, self._read_runs(index, nbytes, lanes), PENDING + WARP_CODE + warps)

    def end_proxy_read(self, index: Indices, nbytes: int, lanes: Indices) -> None:
        """The warps know that it has been read."""
        self._put(True, nbytes, self._read_runs(index, nbytes, lanes), self._signatures(lanes, True))

    # ---- checks ------------------------------------------------------------------------------------------------------

    def _check_writes(
        self,
        index: Indices,
        nbytes: int,
        lanes: Indices,
        at: Instruction,
        *,
        is_read: bool,
        by_proxy: bool = False,
        by_warp: bool = False,
    ) -> None:
        """Check against the previous writers of the bytes. by_warp: a thread that did is not the one that makes the
        access."""
        stamps = self._written_by(index, nbytes)
        if is_read and not stamps.min(initial=1):
            self._tell(Check.UNWRITTEN, "shared memory", lanes[(stamps == 0).any(axis=1)], at)
        settled = self._order.settled_for_proxy if by_proxy else self._order.settled
        if stamps.max(initial=0) > settled:
            event = "it was written" if is_read else "it was written before"
            self._judge(stamps, lanes, at, event, settled, by_proxy, by_warp)

    def _check_overwrite(
        self,
        index: Indices,
        nbytes: int,
        lanes: Indices,
        at: Instruction,
        *,
        by_proxy: bool = False,
        by_warp: bool = False,
    ) -> None:
        self._check_writes(index, nbytes, lanes, at, is_read=False, by_proxy=by_proxy, by_warp=by_warp)
        runs, settled = index >> _shift(nbytes), self._order.settled
        for warp in range(self._order.warps):
            stamps = self._at(True, nbytes, warp * (self._writes.size // self._width(nbytes)) + runs)
            if stamps.max(initial=0) > settled:
                self._judge(stamps, lanes, at, "it was read before", settled, False, by_warp)

    def _judge(
        self, earlier: Stamps, lanes: Indices, at: Instruction, what: str, settled: int, by_proxy: bool, by_warp: bool
    ) -> None:
        """Check each stamp separately. by_proxy: stores also need a proxy fence after them."""
        order = self._order
        if earlier.shape[1] > 1 and (earlier == earlier[:, :1]).all():
            earlier = earlier[:, :1]
        suspects = np.nonzero(earlier > settled)
        stamps, owners = earlier[suspects], lanes[suspects[0]]
        rows, threads = owners // order.threads, (owners % order.threads).astype(np.int32)
        epochs, codes, agents = stamps >> CODE_BITS, stamps & CODES - 1, order.agents_of(stamps)
        is_pending, is_bulk = epochs == PENDING_EPOCH, codes >= MBARRIER_CODE
        is_unseen = epochs > order.seen[rows, threads >> 5, agents]
        is_own = (codes == threads) & ~is_pending & (not by_warp)
        if by_proxy:
            is_unfenced = (epochs > order.fenced[rows, threads >> 5, agents]) & ~is_bulk & ~is_pending
            self._tell_some(Check.PROXY, what, is_unfenced & (is_own | ~is_unseen), owners, codes, at)
        is_being_read = is_pending & (codes >= WARP_CODE) & ~is_bulk
        self._tell_some(Check.ASYNC_SOURCE, "it is being read", is_being_read, owners, codes, at)
        is_copy = (is_pending & ~is_being_read) | (is_bulk & is_unseen)
        self._tell_some(Check.ASYNC_COPY, "it is being copied to", is_copy, owners, codes, at)
        self._tell_some(Check.RACE, what, is_unseen & ~is_own & ~is_pending & ~is_bulk, owners, codes, at)

    def _tell_some(
        self, check: Check, what: str, are: npt.NDArray[np.bool_], owners: Indices, codes: Stamps, at: Instruction
    ) -> None:
        if are.any():
            first = int(codes[are][0])
            self._tell(check, f"{what} by {_who(first)}", owners[are], at)

    # ---- stamps ------------------------------------------------------------------------------------------------------

    def _sign_reads(self, index: Indices, nbytes: int, lanes: Indices, stamps: Stamps, whole_warp: bool) -> None:
        """Record reads. If several threads of a warp read a granule in one epoch, it counts as read by the whole
        warp."""
        runs = self._read_runs(index, nbytes, lanes)
        if whole_warp:
            self._put(True, nbytes, runs, stamps)
            return
        before = self._at(True, nbytes, runs).max(axis=1)
        met = (before >> CODE_BITS == stamps >> CODE_BITS) & (before != stamps)
        signed = np.where(met, self._signatures(lanes, True), stamps) if met.any() else stamps
        self._put(True, nbytes, runs, signed)
        lost = np.flatnonzero(self._at(True, nbytes, runs)[:, 0] != signed)
        if len(lost):
            self._put(True, nbytes, runs[lost], self._signatures(lanes[lost], True))

    def _signatures(self, lanes: Indices, whole_warp: bool) -> Stamps:
        stamps = self._order.stamps.reshape(-1)[lanes]
        if not whole_warp:
            return stamps
        warps = (lanes % self._order.threads >> 5).astype(np.int32)
        return (stamps | CODES - 1) - (CODES - 1 - WARP_CODE) + warps

    def _written_by(self, index: Indices, nbytes: int) -> Stamps:
        return self._at(False, nbytes, index >> _shift(nbytes))

    def _sign(self, index: Indices, nbytes: int, signed: Stamps) -> None:
        self._put(False, nbytes, index >> _shift(nbytes), signed)

    def _read_runs(self, index: Indices, nbytes: int, lanes: Indices) -> Indices:
        """Return the places of each warp's own stamps of the bytes."""
        warps = lanes % self._order.threads >> 5
        return warps * (self._writes.size // self._width(nbytes)) + (index >> _shift(nbytes))

    def _width(self, nbytes: int) -> int:
        return nbytes // self.granule

    def _view(self, of_reads: bool, width: int) -> npt.NDArray[Any]:
        """Runs of `width` stamps as one element each, which numpy moves at once: accesses are aligned."""
        key = of_reads, width
        if key not in self._views:
            kind = {1: "i4", 2: "i8", 4: "c16"}.get(width, f"V{4 * width}")
            self._views[key] = (self._reads if of_reads else self._writes).reshape(-1).view(kind)
        return self._views[key]

    def _at(self, of_reads: bool, nbytes: int, runs: Indices) -> Stamps:
        """[runs, granules of one]."""
        width = self._width(nbytes)
        stamps: Stamps = self._view(of_reads, width).take(runs).view(np.int32).reshape(-1, width)
        return stamps

    def _put(self, of_reads: bool, nbytes: int, runs: Indices, signed: Stamps) -> None:
        width = self._width(nbytes)
        view = self._view(of_reads, width)
        if width == 1:
            view[runs] = signed
            return
        wide = np.empty((len(runs), width), np.int32)
        wide[:] = signed[:, None]
        view[runs] = wide.view(view.dtype)[:, 0]


def _shift(nbytes: int) -> int:
    return nbytes.bit_length() - 1


def _who(code: int) -> str:
    if code >= MBARRIER_CODE:
        return "a bulk copy"
    return f"thread {code}" if code < WARP_CODE else f"warp {code - WARP_CODE}"
