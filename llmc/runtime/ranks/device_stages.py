"""Run an engine for GPUs in pipeline stages, with this process as the first rank of the first stage.

A step's rows go from the device through pinned memory into memory that all ranks share, and from there to the device of
the next stage. The last stage chooses tokens, or returns logits if a request needs them.
"""

from functools import partial

from llmc.program import StepOutput
from llmc.runtime.executors.executor import Chosen, Logits
from llmc.runtime.loop.step import Step
from llmc.runtime.ranks.awaited_step import await_step
from llmc.runtime.ranks.device_part import compute_part, taken_chosen
from llmc.runtime.ranks.device_ranks import RankedDeviceExecutor
from llmc.runtime.ranks.step_rows import Compute
from llmc.runtime.sampling.row_choice import RowChoices


class StagedDeviceExecutor(RankedDeviceExecutor):
    """A RankedDeviceExecutor whose layers are divided into stages. Steps have numbers, by which ranks find rows."""

    _number: int = 0  # of the last step
    _logits: Logits | None = None

    def step(self, step: Step) -> Logits:
        """Run a step on all ranks, stage by stage. Raises RankError as RankedDeviceExecutor."""
        self._logits = self._pass_on(step, StepOutput.LOGITS, None)
        return self._logits

    def choose(self, step: Step, wanted: StepOutput, choices: RowChoices) -> Chosen:
        """A step on all ranks; the last stage chooses."""
        self._logits = None
        return taken_chosen(self._pass_on(step, wanted, choices))

    def logits(self, first: int, count: int) -> Logits:
        """Rows of the last step's logits, which the last stage sends if that step chose tokens."""
        if self._logits is not None:
            return self._logits[first : first + count]
        number, team = self._next_number(), self._team
        team.tell({"do": "logits", "first": first, "count": count, "number": number})
        await_step(team, number)
        return team.memory.logits(number, count)

    def reopen(self) -> None:
        """Start the other ranks again after one was lost. Raises RankError."""
        self._logits = None  # They are in the memory of the ranks before.
        super().reopen()

    def _pass_on(self, step: Step, wanted: StepOutput, choices: RowChoices | None) -> Logits:
        """Run a step in all stages. Returns the memory for the logits of its rows, in which the last stage has put its
        result."""
        number, team = self._next_number(), self._team
        team.tell_step(step, number, choices, wanted)
        own: Compute = partial(compute_part, self._own, StepOutput.LOGITS, None)
        self._checked(lambda: team.rows.run(own, step, number))
        await_step(team, number)
        return team.memory.logits(number, len(step.logit_rows))

    def _next_number(self) -> int:
        # A step that was broken off here may still be under way elsewhere; its place is another.
        self._number += 1
        return self._number
