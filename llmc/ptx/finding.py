"""Findings of the checks: a fault, its place in the kernel, and the first thread that had it."""

from dataclasses import dataclass
from enum import Enum

from llmc.ptx.module import Instruction


class Check(Enum):
    """The kinds of faults. docs/ptx.md describes each."""

    BOUNDS = "outside the launch's buffers"
    ALIGNMENT = "misaligned address"
    READ_ONLY = "write to read-only memory"
    UNWRITTEN = "read of unwritten memory"
    RACE = "two threads on one byte without a barrier between them"
    ASYNC_COPY = "target of an asynchronous copy before its wait"
    ASYNC_SOURCE = "operand of an asynchronous operation overwritten before its wait"
    PROXY = "no proxy fence between a store and an asynchronous read"
    REGISTERS = "register of a wgmma before its wait"
    WGMMA_FENCE = "no wgmma.fence before a wgmma"
    MBARRIER = "misused mbarrier"
    DESCRIPTOR = "misused tensor descriptor"
    BARRIER = "misused barrier"
    GRID_DEPENDENCY = "no griddepcontrol.wait before it"
    OUTPUT = "unwritten element of an output"
    DIVERGENCE = "instruction of a whole warp with a part of it"


@dataclass(frozen=True)
class Finding:
    """One fault. block: its coordinates in the grid, None if it is the whole launch's. thread: its number in the
    block. instruction: where it was found."""

    check: Check
    detail: str
    kernel: str
    block: tuple[int, int, int] | None
    thread: int | None
    instruction: Instruction | None

    def __str__(self) -> str:
        place = self.kernel if self.block is None else f"{self.kernel}, block {self.block}, thread {self.thread}"
        if self.instruction is not None:
            place += f", PTX line {self.instruction.line} ({self.instruction.opcode})"
            place += f", {self.instruction.source}" if self.instruction.source is not None else ""
        return f"{self.check.value}: {self.detail}; {place}"


class Findings:
    """The findings of a launch: the first of each check at each instruction, and their number."""

    def __init__(self, kernel: str, grid: tuple[int, int, int]) -> None:
        self._kernel, self._grid = kernel, grid
        self._first: dict[tuple[Check, int], Finding] = {}
        self._counts: dict[tuple[Check, int], int] = {}

    def add(
        self,
        check: Check,
        detail: str,
        block: int,
        thread: int,
        instruction: Instruction,
        count: int,
    ) -> None:
        """Record a fault. block: its number in the launch. count: number of threads that have it."""
        key = check, instruction.line
        x, y, _ = self._grid
        place = block % x, block // x % y, block // (x * y)
        self._first.setdefault(key, Finding(check, detail, self._kernel, place, thread, instruction))
        self._counts[key] = self._counts.get(key, 0) + count

    def add_to_launch(self, check: Check, detail: str) -> None:
        """Record a fault that does not belong to a single thread."""
        self._first.setdefault((check, 0), Finding(check, detail, self._kernel, None, None, None))
        self._counts[check, 0] = self._counts.get((check, 0), 0) + 1

    def all(self) -> tuple[Finding, ...]:
        """The findings, in the order in which they were made."""
        return tuple(self._first.values())

    def count(self, finding: Finding) -> int:
        """Return the number of threads that had the same fault at the same instruction."""
        return self._counts[finding.check, 0 if finding.instruction is None else finding.instruction.line]
