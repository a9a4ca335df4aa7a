"""Ranks find out whether what they write into each other's memory arrives, before anything waits for it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Barrier

import pytest
import torch
from torch import Tensor

from llmc.runtime.ranks.arriving_writes import writes_arrive

WORDS = 256


@dataclass(frozen=True)
class Done:
    """A queue whose work is done at once, and ends or never does."""

    ends: bool = True

    def run(self, work: Callable[[], None]) -> None:
        if self.ends:
            work()

    def ends_within(self, seconds: float) -> bool:
        return self.ends


def answers(ranks: int, seen: Callable[[int, int, Tensor], Tensor], hangs: int | None = None) -> list[bool]:
    """Of all ranks, each of which sees what it is given of the others' memory."""
    memory = [torch.zeros(WORDS, dtype=torch.int32) for _ in range(ranks)]
    barrier, said = Barrier(ranks), [False] * ranks

    def answer(rank: int) -> bool:
        def all_say(mine: bool) -> bool:
            said[rank] = mine
            barrier.wait()
            every = all(said)
            barrier.wait()
            return every

        words = [tensor if other == rank else seen(rank, other, tensor) for other, tensor in enumerate(memory)]
        return writes_arrive(words, rank, Done(rank != hangs), all_say)

    with ThreadPoolExecutor(ranks) as pool:
        outcomes = list(pool.map(answer, range(ranks)))
    if all(outcomes):
        assert not any(tensor.any() for tensor in memory), "the words are used later"
    return outcomes


@pytest.mark.parametrize("ranks", [2, 8])
def test_memory_that_all_can_write_is_used(ranks: int) -> None:
    assert answers(ranks, lambda rank, other, memory: memory) == [True] * ranks


@pytest.mark.parametrize("ranks", [2, 4])
def test_writes_that_are_dropped_between_two_ranks(ranks: int) -> None:
    """Peer-to-peer copies of two GPUs that never arrive, where collectives wait for ever (vllm#51513): all ranks do
    without the memory, also those that see nothing wrong."""

    def seen(rank: int, other: int, memory: Tensor) -> Tensor:
        return torch.zeros(WORDS, dtype=torch.int32) if (rank, other) == (1, 0) else memory

    assert answers(ranks, seen) == [False] * ranks


def test_a_device_that_hangs() -> None:
    """Its copies never end; the others do not wait for it."""
    assert answers(3, lambda rank, other, memory: memory, hangs=2) == [False] * 3
