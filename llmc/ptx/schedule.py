"""Where the threads of a team are: strands that run, and threads that wait.

The strand that is furthest behind in the text runs first, and strands that meet become one: threads that a branch
divided come together again where the branches do. A strand runs up to an instruction at which its threads may part, or
have to wait for others; that instruction says what comes next.
"""

from dataclasses import dataclass

import numpy as np

from llmc.ptx.global_memory import Indices
from llmc.ptx.lanes import Bools, Mask, whole
from llmc.ptx.module import Instruction


@dataclass
class Strand:
    """Threads at the same instruction. mask: these threads; None for all of the team's."""

    place: int
    mask: Mask


@dataclass(frozen=True)
class Waiting:
    """Threads that cannot go on, for a report. row: the row of their block."""

    row: int
    threads: Indices
    at: Instruction
    what: str


class Schedule:
    """The schedule of a team's threads. shape: [blocks, threads]. alive: threads that have not returned; None for
    all."""

    def __init__(self, shape: tuple[int, int], running: list[Strand], alive: Mask = None) -> None:
        self.shape, self.running, self.alive = shape, running, alive
        # Parts of warps, by the place of the instruction that takes whole ones.
        self.gathering: dict[int, Mask] = {}

    def next(self) -> Strand | None:
        """Take the strand that is furthest behind, with all threads at its instruction; None if none can run."""
        if not self.running:
            return None
        if len(self.running) == 1:
            return self.running.pop()
        place = min(strand.place for strand in self.running)
        strands = [strand for strand in self.running if strand.place == place]
        self.running = [strand for strand in self.running if strand.place != place]
        return strands[0] if len(strands) == 1 else Strand(place, self._united([strand.mask for strand in strands]))

    def _united(self, masks: list[Mask]) -> Mask:
        """Return all threads of several masks."""
        total = np.logical_or.reduce([whole(mask, self.shape) for mask in masks])
        return None if total.all() else total

    def go(self, place: int, mask: Mask) -> None:
        """Let threads continue at a place."""
        self.running.append(Strand(place, mask))

    def part(self, mask: Mask, taken: Bools, target: int, following: int) -> None:
        """Branch the threads of the mask: those with `taken` go to `target`, the others to `following`."""
        jumping = taken if mask is None else mask & taken
        staying = ~taken if mask is None else mask & ~taken
        if not staying.any():
            self.go(target, mask)
        elif not jumping.any():
            self.go(following, mask)
        else:
            self.go(target, whole(jumping, self.shape))
            self.go(following, whole(staying, self.shape))

    def end(self, mask: Mask) -> None:
        """End the threads of the mask, and check the threads that wait for the rest of their warp again."""
        self.alive = self.living() & ~whole(mask, self.shape)
        for place, held in self.gathering.items():
            self.go(place, held)
        self.gathering.clear()

    def living(self) -> Bools:
        """[blocks, threads]: the threads that have not returned."""
        return np.ones(self.shape, np.bool_) if self.alive is None else self.alive

    def gather(self, place: int, mask: Mask) -> tuple[Mask, bool]:
        """The threads of whole warps among those at a place, and whether there are any; the others wait for the rest of
        their warps, except returned threads."""
        if mask is None or mask.shape[1] == 1:
            return mask, True
        held = self.gathering.pop(place, None)
        arrived = whole(mask, self.shape) if held is None else mask | held
        warps = arrived.reshape(self.shape[0], -1, 32)
        missing = (~warps & self.living().reshape(warps.shape)).any(axis=2) & warps.any(axis=2)
        if not missing.any():
            return (mask if held is None else arrived), True
        lacks = np.repeat(missing, 32, axis=1)
        self.gathering[place] = arrived & lacks
        ready = arrived & ~lacks
        return ready, bool(ready.any())

    def take(self, rows: Indices) -> "Schedule":
        """The schedule of some of the blocks, which leave this one."""
        part = Schedule((len(rows), self.shape[1]), [], None if self.alive is None else self.alive[rows])
        part.running = [Strand(s.place, mask) for s in self.running if (mask := _rows_of(s.mask, rows)) is not _NOBODY]
        part.gathering = {p: m for p, mask in self.gathering.items() if (m := _rows_of(mask, rows)) is not _NOBODY}
        return part


_NOBODY = np.zeros((1, 1), np.bool_)


def _rows_of(mask: Mask, rows: Indices) -> Mask:
    """A mask's rows; _NOBODY if they are empty, None if all threads are in them."""
    if mask is None:
        return None
    part = mask if mask.shape[0] == 1 else mask[rows]
    return None if part.all() else part if part.any() else _NOBODY
