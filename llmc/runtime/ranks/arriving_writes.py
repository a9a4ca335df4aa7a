"""Whether what ranks write into each other's memory arrives, within a time limit.

A driver may report that GPUs can reach each other's memory, and their writes may still be lost: with some settings of
PCIe and IOMMU it is dropped, and a collective waits for ever, or adds up what was never sent (vllm#51513). So every
rank writes into every other's memory and looks whether it came, before anything relies on it.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

# A working exchange takes milliseconds.
_SECONDS = 10.0
# Words that nothing uses yet, and what is written there.
_TESTED, _PATTERN = 64, 0x5A5A0000


class Queue(Protocol):
    """Where a device's work is queued."""

    def run(self, work: Callable[[], None]) -> None:
        """Queue it."""

    def ends_within(self, seconds: float) -> bool:
        """Whether all that was queued ends in time."""


def writes_arrive(words: Sequence[Tensor], rank: int, queue: Queue, all_say: Callable[[bool], bool]) -> bool:
    """Whether what each rank writes is there when all others look; the same answer on all of them.

    words: the ranks' memory, int32, as this rank sees it, zeros before and afterwards. all_say: whether every rank says
    so, given what this one does; they wait for each other in it.
    """
    ranks = len(words)
    marks: list[Tensor] = []

    def write() -> None:
        for other in words:
            other[_TESTED + rank : _TESTED + rank + 1].fill_(_PATTERN + rank)

    def look() -> None:
        marks.extend(other[_TESTED : _TESTED + ranks].clone() for other in words)

    def clear() -> None:
        words[rank][_TESTED : _TESTED + ranks].zero_()

    queue.run(write)
    if not all_say(queue.ends_within(_SECONDS)):
        return False
    queue.run(look)
    expected = torch.arange(_PATTERN, _PATTERN + ranks, dtype=torch.int32)
    is_there = queue.ends_within(_SECONDS) and all(bool((mark.cpu() == expected).all()) for mark in marks)
    if not all_say(is_there):
        return False
    queue.run(clear)
    return all_say(queue.ends_within(_SECONDS))
