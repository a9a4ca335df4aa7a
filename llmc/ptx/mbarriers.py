"""mbarriers: objects in shared memory at which threads, and bytes that are copied, arrive.

A phase ends after the number of arrivals that the mbarrier was initialised with, and the expected bytes. Threads that
have waited for it see the earlier accesses of the threads that arrived, and the copies.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from llmc.ptx.errors import PtxError
from llmc.ptx.finding import Check
from llmc.ptx.global_memory import Indices
from llmc.ptx.module import Instruction
from llmc.ptx.order import CODE_BITS, MBARRIER_CODE, MOST_MBARRIERS, PHASE_EPOCH, Clocks, Order
from llmc.ptx.shadow import Shadow, Tell

Counts = npt.NDArray[np.int64]


@dataclass
class _MBarrier:
    """Per block: count: the initial number of arrivals, 0 before initialisation; pending arrivals and bytes; number of
    ended phases. clocks: accesses seen by the arrivals of this phase, and the fenced ones, then the same for the last
    phase. copies: copies of this phase: places in shared memory, bytes of a run, and rows."""

    number: int
    count: Counts
    pending: Counts
    missing_bytes: Counts
    phase: Counts
    clocks: Clocks
    copies: list[tuple[Indices, int, Indices]] = field(default_factory=list)

    def fit(self, agents: int) -> None:
        """Make room for the clocks of `agents` warps and mbarriers."""
        if self.clocks.shape[2] < agents:
            self.clocks = np.pad(self.clocks, ((0, 0), (0, 0), (0, agents - self.clocks.shape[2])))

    @property
    def arrived(self) -> Clocks:
        return self.clocks[:2]

    @property
    def published(self) -> Clocks:
        return self.clocks[2:]


class MBarriers:
    """The mbarriers of a team's blocks, by their offset in shared memory.

    order: see Order. shadow: the record of accesses to shared memory. row_bytes: bytes of shared memory from one block
    to the next. tell: reports a finding about threads.
    """

    def __init__(self, order: Order, shadow: Shadow, row_bytes: int, tell: Tell) -> None:
        self._order, self._shadow, self._row_bytes, self._tell = order, shadow, row_bytes, tell
        self._found: dict[int, _MBarrier] = {}

    def init(self, offset: int, lanes: Indices, count: Counts, at: Instruction) -> None:
        """Threads, at most one of each block, make an mbarrier."""
        rows = lanes // self._order.threads
        mbarrier = self._found.get(offset) or self._new(offset, at)
        used = mbarrier.count[rows] > 0
        if used.any():
            self._tell(
                Check.MBARRIER, f"the mbarrier at byte {offset} is made again before it is invalidated", lanes[used], at
            )
        self._shadow.write(rows * self._row_bytes + offset, 8, lanes, at)
        mbarrier.count[rows] = mbarrier.pending[rows] = count
        mbarrier.missing_bytes[rows] = mbarrier.phase[rows] = 0
        mbarrier.clocks[:, rows] = 0

    def _new(self, offset: int, at: Instruction) -> _MBarrier:
        blocks, number = self._order.blocks, len(self._found)
        if number == MOST_MBARRIERS:
            raise PtxError(
                f"a block makes more than {MOST_MBARRIERS} mbarriers",
                at=f"PTX line {at.line} ({at.opcode})",
                fix="run the engine on its GPU, or by executor='reference'",
            )
        self._order.know_mbarriers(number + 1)
        count, pending, missing, phase = (np.zeros(blocks, np.int64) for _ in range(4))
        clocks = np.zeros((4, blocks, self._order.seen.shape[2]), np.int32)
        barrier = _MBarrier(number, count, pending, missing, phase, clocks)
        self._found[offset] = barrier
        return barrier

    def invalidate(self, offset: int, lanes: Indices, at: Instruction) -> None:
        """The memory is free for something else."""
        valid, barrier = self._usable(offset, lanes, at)
        if barrier is None:
            return
        rows = valid // self._order.threads
        busy = barrier.missing_bytes[rows] != 0
        if busy.any():
            self._tell(
                Check.MBARRIER,
                f"the mbarrier at byte {offset} is invalidated while bytes are expected",
                valid[busy],
                at,
            )
        self._shadow.write(rows * self._row_bytes + offset, 8, valid, at)
        barrier.count[rows] = 0

    def expect(self, offset: int, lanes: Indices, nbytes: Counts, at: Instruction) -> None:
        """Record that the current phase also waits for these bytes."""
        valid, barrier = self._usable(offset, lanes, at)
        if barrier is not None:
            np.add.at(barrier.missing_bytes, valid // self._order.threads, nbytes[np.isin(lanes, valid)])

    def arrive(self, offset: int, lanes: Indices, count: Counts, at: Instruction) -> None:
        """Record that each of the threads arrives `count` times."""
        valid, barrier = self._usable(offset, lanes, at)
        if barrier is None:
            return
        order = self._order
        rows, warps = valid // order.threads, valid % order.threads >> 5
        for own, seen in zip(barrier.arrived, order.published(rows, warps), strict=True):
            np.maximum.at(own, rows, seen)
        ticking = np.zeros((order.blocks, order.warps), np.bool_)
        ticking[rows, warps] = True
        order.tick(ticking)
        np.subtract.at(barrier.pending, rows, count[np.isin(lanes, valid)])
        overfull = barrier.pending[rows] < 0
        if overfull.any():
            expected = barrier.count[rows[overfull]][0]
            detail = f"more threads arrive at the mbarrier at byte {offset} than the {expected} it is for"
            self._tell(Check.MBARRIER, detail, valid[overfull], at)
            barrier.pending[rows[overfull]] = 0
        self._end_phases(barrier)

    def copy(self, offset: int, lanes: Indices, index: Indices, nbytes: int, total: int, at: Instruction) -> None:
        """Bytes arrive. index: where runs of `nbytes` bytes have been copied to, [lanes, runs]; total: bytes each."""
        valid, barrier = self._usable(offset, lanes, at)
        if barrier is None:
            return
        ours = np.isin(lanes, valid)
        rows = valid // self._order.threads
        runs = index[ours]
        owners = np.repeat(valid, runs.shape[1])
        numbers = np.full(len(owners), barrier.number)
        self._shadow.begin_bulk_write(runs.reshape(-1), nbytes, owners, numbers, at)
        barrier.copies.append((runs, nbytes, rows))
        np.subtract.at(barrier.missing_bytes, rows, total)
        self._end_phases(barrier)

    def test(self, offset: int, lanes: Indices, parity: Counts, at: Instruction) -> npt.NDArray[np.bool_]:
        """Return which threads find that the phase of that parity has ended; these have waited for it."""
        order = self._order
        valid, barrier = self._usable(offset, lanes, at)
        ended = np.ones(len(lanes), np.bool_)
        if barrier is None:
            return ended
        ours = np.isin(lanes, valid)
        rows, warps = valid // order.threads, valid % order.threads >> 5
        passes = (barrier.phase[rows] & 1) != parity[ours]
        ended[ours] = passes
        seen, fenced = (clocks[rows[passes]] for clocks in barrier.published)
        order.acquire(rows[passes], warps[passes], seen, fenced)
        return ended

    def _usable(self, offset: int, lanes: Indices, at: Instruction) -> tuple[Indices, _MBarrier | None]:
        """The threads that find an mbarrier there, and the mbarrier; others are reported."""
        barrier = self._found.get(offset)
        rows = lanes // self._order.threads
        is_made = np.zeros(len(lanes), np.bool_) if barrier is None else barrier.count[rows] > 0
        if not is_made.all():
            self._tell(Check.MBARRIER, f"there is no mbarrier at byte {offset}", lanes[~is_made], at)
        valid = lanes[is_made]
        if barrier is None or not len(valid):
            return valid, None
        self._shadow.read(valid // self._order.threads * self._row_bytes + offset, 8, valid, at)
        barrier.fit(self._order.seen.shape[2])
        return valid, barrier

    def _end_phases(self, mbarrier: _MBarrier) -> None:
        rows = np.flatnonzero((mbarrier.count > 0) & (mbarrier.pending == 0) & (mbarrier.missing_bytes == 0))
        if not len(rows):
            return
        mbarrier.phase[rows] += 1
        mbarrier.pending[rows] = mbarrier.count[rows]
        epochs = (PHASE_EPOCH + mbarrier.phase).astype(np.int32)
        mbarrier.published[:, rows] = np.maximum(mbarrier.published[:, rows], mbarrier.arrived[:, rows])
        mbarrier.published[:, rows, self._order.warps + mbarrier.number] = epochs[rows]
        mbarrier.arrived[:, rows] = 0
        left = []
        for runs, nbytes, owners in mbarrier.copies:
            ends = np.isin(owners, rows)
            if ends.any():
                stamps = (epochs[owners[ends]] << CODE_BITS) + MBARRIER_CODE + mbarrier.number
                repeated = np.repeat(stamps.astype(np.int32), runs.shape[1])
                self._shadow.end_bulk_write(runs[ends].reshape(-1), nbytes, repeated)
            if not ends.all():
                left.append((runs[~ends], nbytes, owners[~ends]))
        mbarrier.copies = left

    def state(self, offset: int, row: int) -> str:
        """The state of an mbarrier as text, for errors about waiting threads."""
        barrier = self._found.get(offset)
        if barrier is None:
            return f"an mbarrier at byte {offset} that does not exist"
        return (
            f"phase {barrier.phase[row]} of the mbarrier at byte {offset}, which lacks {barrier.pending[row]} of "
            f"{barrier.count[row]} arrivals and {barrier.missing_bytes[row]} bytes"
        )

    def take(self, rows: Indices, order: Order, shadow: Shadow, tell: Tell) -> "MBarriers":
        """Return the mbarriers of some of the blocks."""
        part = MBarriers(order, shadow, self._row_bytes, tell)
        new_row = np.full(self._order.blocks, -1)
        new_row[rows] = np.arange(len(rows))
        for offset, old in self._found.items():
            count, pending, missing = (array[rows] for array in (old.count, old.pending, old.missing_bytes))
            copy = _MBarrier(old.number, count, pending, missing, old.phase[rows], old.clocks[:, rows])
            for runs, nbytes, owners in old.copies:
                ours = new_row[owners] >= 0
                if ours.any():
                    shift = (new_row[owners] - owners)[ours]
                    copy.copies.append((runs[ours] + shift[:, None] * self._row_bytes, nbytes, owners[ours] + shift))
            part._found[offset] = copy
        return part
