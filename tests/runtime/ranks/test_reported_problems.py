"""What a rank reports when it fails after it was opened, and which rank the error names."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Any

import pytest

from llmc.errors import OptionError, RankError
from llmc.program import RankLayout
from llmc.runtime.memory import zeros
from llmc.runtime.ranks.channel import Channel, SharedMemory
from llmc.runtime.ranks.device_ranks import serve_device_rank
from llmc.runtime.ranks.rank_memory import MemoryLayout, RankMemory
from llmc.runtime.ranks.step_rows import StepRows
from llmc.runtime.ranks.team import Member, Team

LAYOUT = MemoryLayout(RankLayout(1, 3), 4096, 4096, (8, 8), 2, (2, 16))
STEP_ERROR = OptionError("a block table has 9 blocks, and there are 4", at="step", fix="give fewer")


@dataclass
class Failing:
    """An executor whose copies fail. is_lost: whether another rank is lost meanwhile."""

    memory: RankMemory
    is_lost: bool

    def copy_blocks(self, copies: Any, group: int) -> None:
        self.memory.lost[:] = int(self.is_lost)
        raise STEP_ERROR


def reported(*, is_lost: bool) -> Any:
    """The message of a rank that fails."""
    ours, theirs = socket.socketpair()
    memory = RankMemory(zeros(LAYOUT.nbytes), LAYOUT)
    first, channel = Channel(ours), Channel(theirs)

    def opened() -> Any:
        first.send({"do": "copy_blocks", "to": [1], "from": [0], "group": 0})
        return Failing(memory, is_lost)

    serve_device_rank(opened, no_place, channel, StepRows(memory, 1, None, None))
    channel.close()
    assert first.receive() == {}
    found = first.receive()
    first.close()
    return found


def no_place(*_: Any) -> Any:
    raise AssertionError("stages of one rank have nobody to meet")


def test_a_rank_reports_its_error() -> None:
    assert reported(is_lost=False) == {"problem": f"has failed: {STEP_ERROR.problem}"}


def test_an_error_after_a_loss_is_no_problem_of_that_rank() -> None:
    assert reported(is_lost=True) == {"gave_up": f"has failed: {STEP_ERROR.problem}"}


def test_the_error_names_the_rank_that_reports_a_problem() -> None:
    """Not the one that only gave up, nor one that says nothing."""
    shared = SharedMemory.create(LAYOUT.nbytes)
    memory = RankMemory(shared.bytes, LAYOUT)
    ends = [socket.socketpair() for _ in range(2)]
    members = [Member(rank, f"rank {rank}", Channel(ours)) for rank, (ours, _) in enumerate(ends, 1)]
    theirs = [Channel(end) for _, end in ends]
    theirs[0].send({"gave_up": "it lost rank 2"})
    theirs[1].send({"problem": "has failed: out of memory"})
    team = Team(members, shared, memory, memory.place(0), StepRows(memory, 0, None, None), lambda: None)
    try:
        team.is_lost.wait()
        with pytest.raises(RankError, match=r"^rank 2 has failed: out of memory: the engine cannot") as caught:
            team.check()
        assert caught.value.rank == 2
    finally:
        team.close()
        for channel in theirs:
            channel.close()
