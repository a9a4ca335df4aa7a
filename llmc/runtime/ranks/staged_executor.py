"""Run an engine in pipeline stages on CPUs, with this process as a rank of the first stage.

A step passes through the stages in order: its rows go from rank to rank, and the logits come back here.
"""

from llmc.engine_format import EngineDirectory
from llmc.engine_format.weight_check import WeightCheck
from llmc.runtime.executors.executor import Logits
from llmc.runtime.loop.step import Step
from llmc.runtime.ranks.awaited_step import await_step
from llmc.runtime.ranks.ranked_executor import RankedCppExecutor


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
        team.rows.run(self.run, step, number)
        await_step(team, number)
        self.own_output = team.memory.logits(number, len(step.logit_rows))
        self._end_check()
        return self.own_output
