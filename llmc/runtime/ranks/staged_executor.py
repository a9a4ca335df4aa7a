"""Run an engine in pipeline stages on CPUs, with this process as a rank of the first stage.

A step passes through the stages in order: its rows go from rank to rank, and the logits come back here.
"""

from pathlib import Path

from llmc.engine_format import EngineDirectory
from llmc.engine_format.weight_check import WeightCheck
from llmc.runtime.executors.executor import Logits
from llmc.runtime.loop.step import Step
from llmc.runtime.ranks.ranked_executor import RankedCppExecutor
from llmc.runtime.ranks.team import Member
from llmc.settings import settings

_LOOK_SECONDS = 0.25


class StagedCppExecutor(RankedCppExecutor):
    """A RankedCppExecutor whose layers are divided into stages."""

    def __init__(self, engine: EngineDirectory, blocks: int, threads: int, check: WeightCheck | None = None) -> None:
        super().__init__(engine, blocks, threads, check)
        self._number = 0

    def step(self, step: Step) -> Logits:
        """Run a step on all ranks, stage by stage. Raises RankError as RankedCppExecutor."""
        number, team = self._number, self._team
        # A step that was broken off here may still be under way elsewhere; its place is another.
        self._number += 1
        team.tell_step(step, number)
        team.rows.run(self, step, number)
        self._await(number)
        self.own_output = team.memory.logits(number, len(step.logit_rows))
        self._end_check()
        return self.own_output

    def _await(self, number: int) -> None:
        """Wait until the last stage has computed the step's logits."""
        taking, is_there = self._team.rows.taking, False
        assert taking is not None
        still, before = 0, (0, 0)
        while not is_there:
            try:
                is_there = taking.take(number, _LOOK_SECONDS)
            except TimeoutError:
                member = self._team.behind(number)
                now = (0, 0) if member is None else (member.rank, _processor_ticks(member))
                still, before = (still + 1 if now == before else 0), now
                if member is not None and still * _LOOK_SECONDS >= settings().rank_stall_seconds:
                    self._team.lose(member, f"has kept the others waiting for {still * _LOOK_SECONDS:g} s")
            else:
                if not is_there:
                    self._team.fail()
            self._team.check()


def _processor_ticks(member: Member) -> int:
    """The CPU time of a rank's process, which tells a slow rank from a stuck one."""
    if member.process is None:
        return 0
    try:
        text = Path(f"/proc/{member.process.pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    # After the name in parentheses; user and system time are the 14th and 15th of all.
    fields = text.rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
