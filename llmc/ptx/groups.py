"""Asynchronous operations that threads begin, commit in groups, and wait for: cp.async, bulk stores and wgmma."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llmc.ptx.global_memory import Indices

Counts = npt.NDArray[np.int64]
# Called with the accesses that have ended: places in shared memory, bytes each, and threads.
Ended = Callable[[Indices, int, Indices], None]


@dataclass
class _Begun:
    """Operations that threads have started. groups: the number of the group that each thread will commit the access
    in."""

    index: Indices
    nbytes: int
    lanes: Indices
    groups: Counts


class Groups:
    """Groups of asynchronous copies of a team's threads. A group's number is the number of groups that its thread
    committed before it."""

    def __init__(self, lanes: int, ended: Ended) -> None:
        self._committed = np.zeros(lanes, np.int64)
        self._ended = ended
        self._begun: list[_Begun] = []

    def begin(self, index: Indices, nbytes: int, lanes: Indices) -> None:
        """Threads begin accesses of `nbytes` bytes."""
        self._begun.append(_Begun(index, nbytes, lanes, self._committed[lanes]))

    def commit(self, lanes: Indices) -> None:
        """The accesses that the threads have begun since their last commit become a group."""
        self._committed[lanes] += 1

    def wait(self, lanes: Indices, most: int | None) -> None:
        """Wait until at most `most` of each thread's newest groups are pending; None waits for all."""
        limits = np.full(len(self._committed), -1)
        limits[lanes] = np.iinfo(np.int64).max if most is None else self._committed[lanes] - most
        left = []
        for begun in self._begun:
            done = begun.groups < limits[begun.lanes]
            if done.any():
                self._ended(begun.index[done], begun.nbytes, begun.lanes[done])
            if not done.all():
                rest = ~done
                left.append(_Begun(begun.index[rest], begun.nbytes, begun.lanes[rest], begun.groups[rest]))
        self._begun = left

    def pending(self, lanes: Indices) -> npt.NDArray[np.bool_]:
        """Return which threads have started operations for which they have not waited."""
        busy = np.zeros(len(self._committed), np.bool_)
        for begun in self._begun:
            busy[begun.lanes] = True
        return busy[lanes]

    def take(self, rows: Indices, threads: int, row_bytes: int, ended: Ended) -> "Groups":
        """The groups of some of the blocks, which become rows 0, 1 and so on."""
        part = Groups(len(rows) * threads, ended)
        part._committed = self._committed.reshape(-1, threads)[rows].reshape(-1)
        new_row = np.full(len(self._committed) // threads, -1)
        new_row[rows] = np.arange(len(rows))
        for begun in self._begun:
            old = begun.lanes // threads
            ours = new_row[old] >= 0
            if ours.any():
                shift = (new_row[old] - old)[ours]
                lanes, index = begun.lanes[ours] + shift * threads, begun.index[ours] + shift * row_bytes
                part._begun.append(_Begun(index, begun.nbytes, lanes, begun.groups[ours]))
        return part
