"""Registers and shared-memory operands that an unfinished wgmma uses."""

import numpy as np
import numpy.typing as npt

from llmc.ptx.finding import Check
from llmc.ptx.global_memory import Indices
from llmc.ptx.groups import Groups
from llmc.ptx.lanes import Bools, Mask
from llmc.ptx.matrix_descriptor import CHUNK
from llmc.ptx.module import Instruction, Register
from llmc.ptx.order import Order
from llmc.ptx.shadow import Shadow, Tell

Counts = npt.NDArray[np.int64]


class Warpgroups:
    """The unfinished wgmma of a team's warps. For each register that one uses, the group of each warp, counted from 1:
    sums for those that write it, operands for those that read it."""

    def __init__(self, order: Order, shadow: Shadow, tell: Tell) -> None:
        self._order, self._shadow, self._tell = order, shadow, tell
        shape = order.blocks, order.warps
        self._groups = Groups(order.blocks * order.threads, shadow.end_proxy_read)
        self._committed: Counts = np.zeros(shape, np.int64)
        self._sums: dict[int, Counts] = {}
        self._operands: dict[int, Counts] = {}
        # Counts fences and accesses; when each warp last fenced, and when, and in which warps, a register was touched.
        self._time = 0
        self._fenced: Counts = np.full(shape, -1)
        self._touched: dict[int, tuple[int, Mask]] = {}

    def touch(
        self, registers: frozenset[int], copied: tuple[int, int | None] | None, mask: Mask, at: Instruction
    ) -> None:
        """An instruction other than wgmma touches registers that a wgmma uses.

        copied: the target and the source of a move, None for a number. That is another name for the same value:
        compilers put moves behind fences, and ptxas resolves them (zeros that a wgmma adds to become its RZ).
        """
        self._time += 1
        if copied is None:
            self._touched.update(dict.fromkeys(registers, (self._time, mask)))
        else:
            target, source = copied
            self._touched[target] = (-1, None) if source is None else self._touched.get(source, (-1, None))
        for held in (self._sums, self._operands):
            for index in registers & held.keys():
                self._check_free(held, index, self._order.warps_of(mask), at)

    def fence(self, mask: Mask) -> None:
        """wgmma.fence: what was done to registers before it is before the next wgmma."""
        self._time += 1
        self._fenced[self._order.warps_of(mask)] = self._time

    def begin(self, sums: list[Register], operands: list[Register], mask: Mask, at: Instruction) -> None:
        """A wgmma uses registers; a fence must follow all other accesses to them."""
        warps = self._order.warps_of(mask)
        self._check_fenced(sums, operands, warps, at)
        for registers, own, others in ((sums, self._sums, self._operands), (operands, self._operands, self._sums)):
            for register in registers:
                self._check_free(others, register.index, warps, at)
                groups = own.setdefault(register.index, np.zeros_like(self._committed))
                groups[warps] = self._committed[warps] + 1

    def _check_fenced(self, sums: list[Register], operands: list[Register], warps: Bools, at: Instruction) -> None:
        never = warps & (self._fenced < 0)
        if never.any():
            self._tell_warps(Check.WGMMA_FENCE, "there is none before the first", never, at)
        for register in (*sums, *operands):
            time, mask = self._touched.get(register.index, (-1, None))
            late = warps & (self._fenced < time) & ~never
            if late.any() and (late := late & self._order.warps_of(mask)).any():
                self._tell_warps(Check.WGMMA_FENCE, f"{register} was used since the last", late, at)

    def read(self, runs: Indices, leaders: Indices, at: Instruction) -> None:
        """Matrices of warpgroups are read from shared memory, for each of their warps. runs: [warpgroups, runs]."""
        count = runs.shape[1]
        for warp in range(4):
            lanes = np.repeat(leaders + 32 * warp, count)
            self._shadow.begin_proxy_read(runs.reshape(-1), CHUNK, lanes, at)
            self._groups.begin(runs.reshape(-1), CHUNK, lanes)

    def commit(self, mask: Mask) -> None:
        """Make a group of the wgmma that were begun since the last commit."""
        self._committed[self._order.warps_of(mask)] += 1
        self._groups.commit(self._lanes(mask))

    def wait(self, mask: Mask, most: int) -> None:
        """Wait until at most `most` groups are pending."""
        warps = self._order.warps_of(mask)
        limits = np.where(warps, self._committed - most, 0)
        for held in (self._sums, self._operands):
            for index, groups in list(held.items()):
                groups[groups <= limits] = 0
                if not groups.any():
                    del held[index]
        self._groups.wait(self._lanes(mask), most)

    def _check_free(self, held: dict[int, Counts], index: int, warps: Bools, at: Instruction) -> None:
        groups = held.get(index)
        if groups is not None and (busy := warps & (groups > 0)).any():
            self._tell_warps(Check.REGISTERS, "no wgmma.wait_group has waited for it", busy, at)

    def _lanes(self, mask: Mask) -> Indices:
        """The first thread of each warp, which stands for it."""
        rows, warps = np.nonzero(self._order.warps_of(mask))
        return rows * self._order.threads + 32 * warps

    def _tell_warps(self, check: Check, detail: str, warps: Bools, at: Instruction) -> None:
        rows, own = np.nonzero(warps)
        self._tell(check, detail, rows * self._order.threads + 32 * own, at)

    def take(self, rows: Indices, order: Order, shadow: Shadow, row_bytes: int, tell: Tell) -> "Warpgroups":
        """The warpgroups of some of the blocks."""
        part = Warpgroups(order, shadow, tell)
        part._groups = self._groups.take(rows, order.threads, row_bytes, shadow.end_proxy_read)
        part._committed, part._fenced, part._time = self._committed[rows], self._fenced[rows], self._time
        part._sums, part._operands = (
            {index: groups[rows] for index, groups in held.items() if groups[rows].any()}
            for held in (self._sums, self._operands)
        )
        part._touched = {
            index: (time, mask if mask is None or mask.shape[0] == 1 else mask[rows])
            for index, (time, mask) in self._touched.items()
        }
        return part
