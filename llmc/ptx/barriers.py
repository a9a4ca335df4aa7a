"""bar.sync and bar.arrive: the sixteen barriers of a block, by whole warps."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from llmc.ptx.finding import Check
from llmc.ptx.global_memory import Indices
from llmc.ptx.lanes import Bools, Mask, whole
from llmc.ptx.module import Instruction
from llmc.ptx.order import Order
from llmc.ptx.schedule import Schedule, Strand, Waiting
from llmc.ptx.shadow import Tell

_COUNT = 16


@dataclass
class _Barrier:
    """A barrier of a block. wanted: number of threads that must arrive in each block, 0 before the first arrival; None
    if all live threads must."""

    wanted: npt.NDArray[np.int64]
    warps: Bools
    is_for_all: bool = False
    held: list[tuple[Strand, Instruction]] = field(default_factory=list)


class Barriers:
    """The barriers of a team's blocks."""

    def __init__(self, order: Order, schedule: Schedule, tell: Tell) -> None:
        self._order, self._schedule, self._tell = order, schedule, tell
        self._barriers: dict[int, _Barrier] = {}

    def arrive(self, number: int, count: int | None, mask: Mask, following: int | None, at: Instruction) -> None:
        """Whole warps arrive. count: number of threads; None for all that have not returned. following: the instruction
        at which they continue once `count` have arrived; None if they do not wait."""
        order = self._order
        if not 0 <= number < _COUNT:
            lanes = np.flatnonzero(np.repeat(order.warps_of(mask), 32, axis=1))
            self._tell(Check.BARRIER, f"there is no barrier {number}, the last is {_COUNT - 1}", lanes, at)
        is_full = count is None or count == order.threads
        if mask is None and is_full and following is not None and number not in self._barriers:
            order.join(np.ones((order.blocks, order.warps), np.bool_))
            self._schedule.go(following, None)
            return
        barrier = self._barriers.get(number)
        if barrier is None:
            barrier = _Barrier(np.zeros(order.blocks, np.int64), np.zeros((order.blocks, order.warps), np.bool_))
            self._barriers[number] = barrier
        warps = order.warps_of(mask)
        self._check_count(number, count, warps, barrier, at)
        twice = warps & barrier.warps
        if twice.any():
            lanes = np.flatnonzero(np.repeat(twice, 32, axis=1))
            self._tell(Check.BARRIER, f"a warp arrives at barrier {number} again before it is complete", lanes, at)
        barrier.warps |= warps
        barrier.is_for_all = count is None
        barrier.wanted[warps.any(axis=1)] = count or 0
        if following is not None:
            barrier.held.append((Strand(following, whole(mask, self._schedule.shape)), at))
        self._complete(number, barrier, at)

    def _check_count(self, number: int, count: int | None, warps: Bools, barrier: _Barrier, at: Instruction) -> None:
        """Check that all arrivals at a barrier name the same number of threads."""
        differs = warps.any(axis=1) & barrier.warps.any(axis=1) & (barrier.wanted != (count or 0))
        if differs.any():
            lanes = np.flatnonzero(np.repeat(warps & differs[:, None], 32, axis=1))
            wanted = int(barrier.wanted[differs][0]) or "all"
            detail = f"barrier {number} is for {wanted} threads to some, for {count or 'all'} to others"
            self._tell(Check.BARRIER, detail, lanes, at)

    def look_again(self, at: Instruction) -> None:
        """Complete the barriers for all threads that now wait only for threads that have ended."""
        for number, barrier in list(self._barriers.items()):
            if barrier.is_for_all:
                self._complete(number, barrier, at)

    def _complete(self, number: int, barrier: _Barrier, at: Instruction) -> None:
        arrived = 32 * barrier.warps.sum(axis=1)
        wanted = self._wanted(barrier)
        overfull = (arrived > wanted) & (arrived > 0)
        if overfull.any():
            row = int(np.flatnonzero(overfull)[0])
            detail = f"{arrived[row]} threads arrive at barrier {number}, which is for {wanted[row]}"
            self._tell(Check.BARRIER, detail, np.array([row * self._order.threads]), at)
        done = (arrived >= wanted) & (arrived > 0)
        if not done.any():
            return
        self._order.join(barrier.warps & done[:, None])
        left = []
        for strand, where in barrier.held:
            leaving = whole(strand.mask, self._schedule.shape) & done[:, None]
            if leaving.any():
                self._schedule.go(strand.place, None if leaving.all() else leaving)
            staying = whole(strand.mask, self._schedule.shape) & ~done[:, None]
            if staying.any():
                left.append((Strand(strand.place, staying), where))
        barrier.warps[done] = False
        barrier.held = left
        if not barrier.warps.any():
            del self._barriers[number]

    def _wanted(self, barrier: _Barrier) -> npt.NDArray[np.int64]:
        if not barrier.is_for_all:
            return barrier.wanted
        living = self._schedule.living().reshape(self._order.blocks, -1, 32).any(axis=2)
        wanted: npt.NDArray[np.int64] = 32 * living.sum(axis=1)
        return wanted

    def waiting(self) -> Iterator[Waiting]:
        """The waiting threads of each barrier, and the number of arrivals."""
        for number, barrier in self._barriers.items():
            arrived, wanted = 32 * barrier.warps.sum(axis=1), self._wanted(barrier)
            for strand, at in barrier.held:
                mask = whole(strand.mask, self._schedule.shape)
                for row in np.flatnonzero(mask.any(axis=1)):
                    reason = f"barrier {number}, at which {arrived[row]} of {wanted[row]} threads have arrived"
                    yield Waiting(int(row), np.flatnonzero(mask[row]), at, reason)

    def take(self, rows: Indices, order: Order, schedule: Schedule, tell: Tell) -> "Barriers":
        """The barriers of some of the blocks."""
        part = Barriers(order, schedule, tell)
        for number, barrier in self._barriers.items():
            held = [
                (Strand(strand.place, own), at)
                for strand, at in barrier.held
                if (own := whole(strand.mask, self._schedule.shape)[rows]).any()
            ]
            warps = barrier.warps[rows]
            if warps.any():
                part._barriers[number] = _Barrier(barrier.wanted[rows], warps, barrier.is_for_all, held)
        return part
