"""The rows that a rank passes on when its part of a step fails."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest

from llmc.program import RankLayout
from llmc.runtime.loop.step import Step
from llmc.runtime.memory import zeros
from llmc.runtime.ranks.channel import Channel
from llmc.runtime.ranks.hop import Rows
from llmc.runtime.ranks.rank_memory import MemoryLayout, RankMemory
from llmc.runtime.ranks.step_rows import StepRows
from tests.runtime.device.decode_step import decodes

COUNT, WIDTH, VOCABULARY = 2, 8, 16


@pytest.fixture
def stages() -> Iterator[tuple[StepRows, StepRows]]:
    """The two ranks of two stages, which share memory."""
    layout = MemoryLayout(RankLayout(1, 2), 4096, 4096, (WIDTH,), COUNT, (COUNT, VOCABULARY))
    memory = RankMemory(zeros(layout.nbytes), layout)
    forth, back = socket.socketpair(), socket.socketpair()
    first = StepRows.between(memory, 0, Channel(back[1]), Channel(forth[0]))
    last = StepRows.between(memory, 1, Channel(forth[1]), Channel(back[0]))
    with ExitStack() as stack:
        for rows in (first, last):
            stack.callback(rows.close)
        yield first, last


def step() -> Step:
    whole = decodes([3, 5])
    return replace(whole, logit_rows=np.arange(COUNT, dtype=np.int32))


def fill(step: Step, output: Rows | None) -> None:
    assert output is not None
    output[:] = 1.0


def interrupt(step: Step, output: Rows | None) -> None:
    raise KeyboardInterrupt


def test_a_last_stage_that_fails_gives_no_result(stages: tuple[StepRows, StepRows]) -> None:
    """What the result's memory holds would be read as token ids."""
    first, last = stages
    assert first.taking is not None
    first.run(fill, step(), 0)
    with pytest.raises(KeyboardInterrupt):
        last.run(interrupt, step(), 0)
    assert last.memory.ended(1)[0] == 0
    # Messages keep their order, so that of a later step shows that there was none before.
    first.run(fill, step(), 1)
    last.run(fill, step(), 1)
    assert not first.taking.take(0)
    assert first.taking.take(1)


def test_a_first_rank_that_is_interrupted_lets_the_next_stage_continue(stages: tuple[StepRows, StepRows]) -> None:
    first, last = stages
    assert first.taking is not None
    with pytest.raises(KeyboardInterrupt):
        first.run(interrupt, step(), 0)
    last.run(fill, step(), 0)
    assert first.taking.take(0)
    assert [int(first.memory.ended(rank)[0]) for rank in range(2)] == [1, 1]
