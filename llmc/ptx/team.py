"""Blocks that are executed together: their registers, their memory, and where their threads are in the code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from llmc.ptx.barriers import Barriers
from llmc.ptx.finding import Check
from llmc.ptx.global_memory import Indices
from llmc.ptx.groups import Groups
from llmc.ptx.lanes import U32, Bools, Mask, Values, select, whole
from llmc.ptx.launch import Launch
from llmc.ptx.mbarriers import MBarriers
from llmc.ptx.module import Instruction, Register
from llmc.ptx.order import Order
from llmc.ptx.published_maps import PublishedMaps
from llmc.ptx.schedule import Schedule, Strand, Waiting
from llmc.ptx.shared_memory import SharedMemory
from llmc.ptx.warpgroups import Warpgroups

# The end of a run of instructions, which decides where threads continue.
End = Callable[["Team", Strand], None]


@dataclass(frozen=True)
class Ending:
    """Executes an instruction after which threads may diverge or have to wait; others are actions."""

    go: End


# Fewer threads are not worth the copies that make a team smaller.
_LEAST_SPLIT = 1024


@dataclass
class Test:
    """Threads that test an mbarrier until its phase ends. again: tests it. describe: it, for a row and a thread."""

    strand: Strand
    at: Instruction
    again: End
    describe: Callable[[Team, int, int], str]


class Team:
    """Some blocks of a launch, in rows. numbers: numbers of the blocks in the grid. executed: number of executed
    instructions.

    leaving: rows that are better off as a separate team.
    """

    def __init__(self, launch: Launch, numbers: Indices) -> None:
        self._place(launch, numbers)
        plan = launch.plan
        self.registers: list[Values] = list(plan.blank_registers)
        self.carry: Values = np.zeros((1, 1), np.uint64)
        self.order = Order(self.blocks, self.threads)
        self.schedule = Schedule(self.shape, [Strand(0, None)])
        self.shared = SharedMemory(self.blocks, self.threads, plan.shared_bytes, plan.granule, self.order, self.tell)
        self.local = np.zeros(self.blocks * self.threads * plan.local_bytes, np.uint8)
        self.barriers = Barriers(self.order, self.schedule, self.tell)
        self.mbarriers = MBarriers(self.order, self.shared.shadow, self.shared.row_bytes, self.tell)
        self.copies = Groups(self.blocks * self.threads, self.shared.shadow.end_write)
        self.bulk_stores = Groups(self.blocks * self.threads, self.shared.shadow.end_proxy_read)
        self.warpgroups = Warpgroups(self.order, self.shared.shadow, self.tell)
        self.tensor_maps = PublishedMaps(self.order)
        self.has_waited = np.zeros(self.blocks * self.threads, np.bool_)
        self.tests: list[Test] = []
        self.executed = 0

    def _place(self, launch: Launch, numbers: Indices) -> None:
        self.launch, self.numbers = launch, numbers
        self.blocks, self.threads = len(numbers), launch.plan.threads
        self.shape = self.blocks, self.threads
        self.specials = _specials(launch, numbers)
        self.leaving: Bools | None = None
        self._every_lane = np.arange(self.blocks * self.threads)

    def take(self, rows: Indices) -> Team:
        """Return some of the blocks as a separate team; the others are no longer valid here."""
        part = object.__new__(Team)
        part._place(self.launch, self.numbers[rows])
        part.registers = [self._rows_of(value, rows) for value in self.registers]
        part.carry = self._rows_of(self.carry, rows)
        part.order = self.order.take(rows)
        part.schedule = self.schedule.take(rows)
        part.shared = self.shared.take(rows, part.order, part.tell)
        shadow, row_bytes = part.shared.shadow, self.shared.row_bytes
        part.local = self.local.reshape(self.blocks, -1)[rows].reshape(-1)
        part.barriers = self.barriers.take(rows, part.order, part.schedule, part.tell)
        part.mbarriers = self.mbarriers.take(rows, part.order, shadow, part.tell)
        part.copies = self.copies.take(rows, self.threads, row_bytes, shadow.end_write)
        part.bulk_stores = self.bulk_stores.take(rows, self.threads, row_bytes, shadow.end_proxy_read)
        part.warpgroups = self.warpgroups.take(rows, part.order, shadow, row_bytes, part.tell)
        part.tensor_maps = self.tensor_maps.take(rows, part.order)
        part.has_waited = self.has_waited.reshape(self.shape)[rows].reshape(-1)
        part.executed = self.executed
        part.tests = [
            Test(Strand(test.strand.place, mask), test.at, test.again, test.describe)
            for test in self.tests
            if (mask := self.whole(test.strand.mask)[rows]).any()
        ]
        return part

    def _rows_of(self, value: Values, rows: Indices) -> Values:
        return value[rows] if value.shape[0] == self.blocks else value

    # ---- registers ---------------------------------------------------------------------------------------------------

    def write(self, register: Register, value: Values, mask: Mask) -> None:
        """Write a register of the threads in the mask. value: one value per thread, in the register's size."""
        if mask is not None:
            value = select(mask, value, self.registers[register.index])
        self.registers[register.index] = value

    def write_carry(self, value: Values, mask: Mask) -> None:
        """The flag that `.cc` leaves."""
        self.carry = value if mask is None else select(mask, value, self.carry)

    # ---- lanes -------------------------------------------------------------------------------------------------------

    def whole(self, mask: Mask) -> Bools:
        """The mask with an element for each thread."""
        return whole(mask, self.shape)

    def lanes(self, mask: Mask) -> Indices:
        """The threads of the mask as numbers among all of the team's, row by row."""
        return self._every_lane if mask is None else np.flatnonzero(self.whole(mask))

    def chosen(self, value: Values, mask: Mask) -> npt.NDArray[Any]:
        """A value's elements for the threads of the mask, in the order of `lanes`."""
        spread = np.broadcast_to(value, self.shape)
        return spread.reshape(-1) if mask is None else spread[self.whole(mask)]

    def placed(self, values: npt.NDArray[Any], mask: Mask) -> Values:
        """The other way: each value at its thread's place, zeros at others'."""
        if mask is None:
            return values.reshape(self.shape)
        spread = np.zeros(self.shape, values.dtype)
        spread[self.whole(mask)] = values
        return spread

    def leaders(self, mask: Mask) -> Indices:
        """The first thread of each warp in the mask."""
        rows, warps = np.nonzero(self.order.warps_of(mask))
        return rows * self.threads + 32 * warps

    def warpgroup_leaders(self, mask: Mask, at: Instruction) -> Indices:
        """The first thread of each warpgroup in the mask; an incomplete warpgroup is reported and left out."""
        warps = self.order.warps_of(mask)
        if (
            warps.shape[1] % 4
            or (warps.reshape(len(warps), -1, 4).any(axis=2) != warps.reshape(len(warps), -1, 4).all(axis=2)).any()
        ):
            self.tell(Check.DIVERGENCE, "some warps of a warpgroup are missing", self.leaders(mask), at)
            return np.zeros(0, np.intp)
        rows, groups = np.nonzero(warps[:, ::4])
        return rows * self.threads + 128 * groups

    # ---- where threads go --------------------------------------------------------------------------------------------

    def branch(self, strand: Strand, taken: Bools, target: int, following: int) -> None:
        """Part a strand. Where a loop goes on for a few blocks alone, those leave."""
        self.schedule.part(strand.mask, taken, target, following)
        if target < following and self.blocks > 1 and self.blocks * self.threads >= _LEAST_SPLIT and not taken.all():
            staying = np.logical_or.reduce(taken if strand.mask is None else strand.mask & taken, axis=1)
            if len(staying) == self.blocks and 0 < 2 * int(staying.sum()) <= self.blocks:
                self.leaving = staying

    def end(self, mask: Mask, at: Instruction) -> None:
        """End the threads of the mask. Report threads that end before they have waited for earlier launches."""
        lanes = self.lanes(mask)
        if self.launch.waits and not self.has_waited[lanes].all():
            early = lanes[~self.has_waited[lanes]]
            self.tell(Check.GRID_DEPENDENCY, "it returns, and later launches take this one for complete", early, at)
        busy = self.bulk_stores.pending(lanes)
        if busy.any():
            self.tell(Check.ASYNC_SOURCE, "it returns while bulk stores read shared memory", lanes[busy], at)
        self.schedule.end(mask)
        self.barriers.look_again(at)
        living = np.logical_or.reduce(self.schedule.living(), axis=1)
        if self.blocks * self.threads >= _LEAST_SPLIT and 0 < 2 * int(living.sum()) <= self.blocks:
            self.leaving = living

    def retry(self) -> bool:
        """Let threads test their mbarriers again; return whether any can continue."""
        tests, self.tests = self.tests, []
        for test in tests:
            test.again(self, test.strand)
        return bool(self.schedule.running)

    def waiting(self) -> Iterator[Waiting]:
        """The threads that cannot continue, their places, and the reasons."""
        yield from self.barriers.waiting()
        for test in self.tests:
            mask = self.whole(test.strand.mask)
            for row in np.flatnonzero(mask.any(axis=1)):
                threads = np.flatnonzero(mask[row])
                yield Waiting(int(row), threads, test.at, test.describe(self, int(row), int(threads[0])))
        for place, held in self.schedule.gathering.items():
            mask = self.whole(held)
            for row in np.flatnonzero(mask.any(axis=1)):
                at = self.launch.plan.kernel.instructions[place]
                yield Waiting(int(row), np.flatnonzero(mask[row]), at, "the other threads of its warp")

    # ---- faults ------------------------------------------------------------------------------------------------------

    def tell(self, check: Check, detail: str, lanes: Indices, at: Instruction) -> None:
        """Record a fault of threads."""
        row, thread = divmod(int(lanes[0]), self.threads)
        self.launch.findings.add(check, detail, int(self.numbers[row]), thread, at, len(lanes))


def _specials(launch: Launch, numbers: Indices) -> dict[str, Values]:
    """Special registers: those of the block's number, and of the thread's number in it."""
    x, y, z = launch.grid
    threads = np.arange(launch.plan.threads, dtype=U32)[None, :]
    block = numbers.astype(np.int64)[:, None]
    zero = np.zeros((1, 1), U32)
    counts = {"ntid.x": launch.plan.threads, "ntid.y": 1, "ntid.z": 1, "nctaid.x": x, "nctaid.y": y, "nctaid.z": z}
    return {
        "%tid.x": threads,
        "%tid.y": zero,
        "%tid.z": zero,
        "%ctaid.x": (block % x).astype(U32),
        "%ctaid.y": (block // x % y).astype(U32),
        "%ctaid.z": (block // (x * y)).astype(U32),
        "%laneid": threads & np.uint32(31),
        "%warpid": threads >> np.uint32(5),
        **{f"%{name}": np.full((1, 1), count, U32) for name, count in counts.items()},
    }
