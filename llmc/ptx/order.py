"""The happens-before order of a block's threads: vector clocks of its warps and mbarriers.

Each warp counts its own epochs; a new one begins where it synchronizes. A stamp identifies the warp or thread that
accessed a byte, and its epoch: `epoch · 2048 + code`. A code below 1024 is a thread, 1024 + w all of warp w, 1056 + m
what the phases of mbarrier m complete. `seen` has for each warp the newest epoch of every other that is known to have
happened before. `fenced` is the part of it that a proxy fence has made visible to asynchronous copies and wgmma.
"""

import numpy as np
import numpy.typing as npt

from llmc.ptx.lanes import Bools, Mask, whole

Stamps = npt.NDArray[np.int32]
Clocks = npt.NDArray[np.int32]

CODE_BITS = 11
CODES = 1 << CODE_BITS
WARP_CODE = 1024
MBARRIER_CODE = 1056
MOST_MBARRIERS = CODES - MBARRIER_CODE
# Epochs of warps are below this, phases of mbarriers start here: no settled stamp of a warp covers them.
PHASE_EPOCH = 1 << 18
# The stamp of an untouched byte, and the epoch of a future access.
NEVER = np.int32(-1)
PENDING_EPOCH = (1 << 20) - 1
PENDING = np.int32(PENDING_EPOCH << CODE_BITS)


class Order:
    """The order of the blocks of a team. threads: number of threads of a block."""

    def __init__(self, blocks: int, threads: int) -> None:
        self.blocks, self.threads, self.warps = blocks, threads, -(-threads // 32)
        self.now: Clocks = np.ones((blocks, self.warps), np.int32)
        self.seen: Clocks = np.zeros((blocks, self.warps, self.warps), np.int32)
        self.fenced = self.seen.copy()
        self._floor: Clocks = np.zeros(blocks, np.int32)
        self._thread_codes = np.arange(threads, dtype=np.int32)
        self._refresh()

    def take(self, rows: npt.NDArray[np.intp]) -> "Order":
        """The order of some of the blocks."""
        part = Order(len(rows), self.threads)
        part.now, part.seen, part.fenced = self.now[rows], self.seen[rows], self.fenced[rows]
        part._floor = self._floor[rows]
        part._refresh()
        return part

    def _refresh(self) -> None:
        epochs = np.repeat(self.now, 32, axis=1)[:, : self.threads] << CODE_BITS
        # [blocks, threads]: what each thread signs with now.
        self.stamps: Stamps = epochs + self._thread_codes
        # Stamps up to these conflict with no later access, or with no asynchronous operation.
        floor, fenced = int(self._floor.min()), int(self.fenced[:, :, : self.warps].min())
        self.settled = (floor + 1 << CODE_BITS) - 1
        self.settled_for_proxy = (min(floor, fenced) + 1 << CODE_BITS) - 1

    def warps_of(self, mask: Mask) -> Bools:
        """[blocks, warps]: which warps have a thread in the mask."""
        lanes = whole(mask, (self.blocks, self.threads))
        if self.threads % 32:
            lanes = np.pad(lanes, ((0, 0), (0, -self.threads % 32)))
        warps: Bools = np.logical_or.reduce(lanes.reshape(self.blocks, self.warps, 32), axis=2)
        return warps

    def agents_of(self, stamps: Stamps) -> npt.NDArray[np.intp]:
        """The index in `seen` of the signer."""
        codes = (stamps & CODES - 1).astype(np.intp)
        agents = np.where(codes < WARP_CODE, codes >> 5, codes - WARP_CODE)
        return np.where(codes >= MBARRIER_CODE, self.warps + codes - MBARRIER_CODE, agents)

    def know_mbarriers(self, count: int) -> None:
        """Make room for the phases of `count` mbarriers."""
        missing = self.warps + count - self.seen.shape[2]
        if missing > 0:
            self.seen, self.fenced = (
                np.pad(clocks, ((0, 0), (0, 0), (0, missing))) for clocks in (self.seen, self.fenced)
            )

    def join(self, warps: Bools) -> None:
        """Synchronize the warps of each block: each has seen what any of them has seen. A new epoch begins for them."""
        rows = np.flatnonzero(warps.any(axis=1))
        meeting = warps[rows]
        now = np.where(meeting, self.now[rows], 0)
        for clocks in (self.seen, self.fenced):
            most = np.where(meeting[:, :, None], clocks[rows], 0).max(axis=1)
            if clocks is self.seen:
                most[:, : self.warps] = np.maximum(most[:, : self.warps], now)
            clocks[rows] = np.where(meeting[:, :, None], np.maximum(clocks[rows], most[:, None]), clocks[rows])
        newest = now.max(axis=1)
        self.now[rows] = np.where(meeting, newest[:, None] + 1, self.now[rows])
        is_all = meeting.all(axis=1)
        self._floor[rows[is_all]] = newest[is_all]
        self._refresh()

    def tick(self, warps: Bools) -> None:
        """Begin a new epoch of each of the warps, which has seen its own earlier ones."""
        rows, own = np.nonzero(warps)
        self.seen[rows, own, own] = self.now[rows, own]
        self.now[rows, own] += 1
        self._refresh()

    def fence(self, warps: Bools) -> None:
        """A proxy fence of the warps: what they have seen, and done, asynchronous operations see from now on."""
        self.tick(warps)
        self.fenced[warps] = np.maximum(self.fenced[warps], self.seen[warps])
        self._refresh()

    def published(self, rows: npt.NDArray[np.intp], warps: npt.NDArray[np.intp]) -> tuple[Clocks, Clocks]:
        """The accesses that each warp has seen, including its own epoch, and the fenced ones: for a warp that acquires
        them."""
        seen = self.seen[rows, warps]
        seen[np.arange(len(rows)), warps] = self.now[rows, warps]
        return seen, self.fenced[rows, warps]

    def acquire(self, rows: npt.NDArray[np.intp], warps: npt.NDArray[np.intp], seen: Clocks, fenced: Clocks) -> None:
        """Record that each warp sees what another has published."""
        for clocks, added in ((self.seen, seen), (self.fenced, fenced)):
            np.maximum.at(clocks, (rows, warps), added)
