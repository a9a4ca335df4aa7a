"""A rank's part of a step on a device, with its result in memory that ranks share: rows, logits or chosen tokens."""

from typing import Protocol

import numpy as np
import numpy.typing as npt

from llmc.program import CHOICE_OUTPUTS, StepOutput
from llmc.runtime.device.device_place import DevicePlace
from llmc.runtime.executors.executor import ChoosingExecutor, Chosen, SideOutputExecutor
from llmc.runtime.loop.step import Step
from llmc.runtime.ranks.hop import Rows
from llmc.runtime.sampling.row_choice import RowChoices


class DeviceExecutor(ChoosingExecutor, SideOutputExecutor, Protocol):
    """The executor of each rank, which can be connected to the others. Before the last stage, `step` returns the rows
    for the next one: [tokens, columns], fp32."""

    def join(self, place: DevicePlace) -> None:
        """Connect to the other ranks' memory before the first step, or before the first after they started again."""

    def follow(self, step: Step) -> None:
        """Run a step for its collectives and its cache; its results are not used on this rank."""


def compute_part(
    executor: DeviceExecutor, wanted: StepOutput, choices: RowChoices | None, step: Step, output: Rows | None
) -> None:
    """Run a rank's part of a step.

    Args:
        executor: The rank's executor.
        wanted: The result of the step if it chooses tokens.
        choices: How tokens are chosen, on the rank that chooses them; None for rows and logits.
        step: The step, with the rows of the stage before.
        output: Memory for the result; None if no other rank needs it.
    """
    if output is None:
        executor.follow(step)
    elif choices is None:
        output[:] = executor.step(step)
    else:
        chosen = executor.choose(step, wanted, choices)
        tokens, scores, covered = _numbers(output)
        tokens[:], scores.view(np.float32)[:], covered[:] = chosen.tokens, chosen.scores, chosen.covered


def taken_chosen(output: Rows) -> Chosen:
    """Return a copy of the tokens that another rank has chosen. output: the memory for the logits of their rows."""
    tokens, scores, covered = _numbers(output).copy()
    return Chosen(tokens, scores.view(np.float32), covered.astype(np.bool_))


def _numbers(output: Rows) -> npt.NDArray[np.int32]:
    """[CHOICE_OUTPUTS, rows]: the beginning of memory for logits of [rows, vocabulary]."""
    count = len(CHOICE_OUTPUTS) * len(output)
    return output.reshape(-1)[:count].view(np.int32).reshape(len(CHOICE_OUTPUTS), -1)
