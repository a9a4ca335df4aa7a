"""Run an engine in pipeline stages on CPUs, of which this process is a rank of the first.

A step passes through the stages one after the other: its rows go from rank to rank, and the logits come back here.
While a later stage computes one step, this one may begin the next, as long as memory has room for both.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from llmc.engine_format import EngineDirectory
from llmc.engine_format.weight_check import WeightCheck
from llmc.runtime.executors.executor import Logits
from llmc.runtime.loop.step import Step
from llmc.runtime.ranks.ranked_executor import RankedCppExecutor

_LOOK_SECONDS = 0.25


class StagedCppExecutor(RankedCppExecutor):
    """As RankedCppExecutor, with layers in stages. depth: how many steps can be under way at once."""

    def __init__(self, engine: EngineDirectory, blocks: int, threads: int, check: WeightCheck | None = None) -> None:
        super().__init__(engine, blocks, threads, check)
        self.depth = self._team.memory.layout.slots
        self._begun: deque[_Begun] = deque()
        self._ended: Step | None = None
        self._count = 0

    def begin(self, step: Step) -> None:
        """Let a step set out, which later `step` brings to its end: those begun first come first. Its arrays may change
        meanwhile. At most `depth` may be under way. Raises RankError."""
        slot = self._count % self.depth
        self._count += 1
        self._team.tell_step(step, slot)
        self._begun.append(_Begun(step, slot, len(step.logit_rows)))
        self._team.rows.run(self, step, slot)

    def step(self, step: Step) -> Logits:
        """The logits of the step that was begun first, which must be this one; or of this one, begun now. Of the one
        that has ended last they are still there."""
        if step is self._ended:
            return self._logits
        if not self._begun:
            self.begin(step)
        begun = self._begun.popleft()
        assert begun.step is step, "steps end in the order in which they began"
        self._await_results()
        self._logits = self._team.memory.logits(begun.slot, begun.logit_rows)
        self._ended = step
        self._end_check()
        return self._logits

    def reopen(self) -> None:
        """As RankedCppExecutor; what was under way is forgotten."""
        super().reopen()
        self._begun.clear()
        self._ended, self._count = None, 0

    def _await_results(self) -> None:
        taking = self._team.rows.taking
        assert taking is not None
        while True:
            try:
                slot = taking.take(_LOOK_SECONDS)
            except TimeoutError:
                self._team.check()
                continue
            if slot is None:
                self._team.fail()
            self._team.check()
            return


@dataclass(frozen=True)
class _Begun:
    """A step under way. logit_rows: how many it has."""

    step: Step
    slot: int
    logit_rows: int
