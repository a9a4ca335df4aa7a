"""One of two places in pinned memory through which steps of a device take their inputs and bring their tokens back.

Steps that are queued before the last one has ended alternate between the places, so that none overwrites what another
reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor
from torch.cuda import Event

from llmc.program import Limits, StepOutput
from llmc.runtime.device.decode_inputs import DecodeInputs
from llmc.runtime.device.inputs import StepShape, pack_inputs
from llmc.runtime.device.prompt_inputs import PromptInputs, PromptSizes
from llmc.runtime.loop.step import Step
from llmc.runtime.sampling.row_choice import RowChoices


class StepKind(NamedTuple):
    """Steps of one kind are one graph. lane: which one. is_fed: whether the last step's tokens are the input ids."""

    shape: StepShape
    wanted: StepOutput
    sides: tuple[str, ...]
    lane: int = 0
    is_fed: bool = False


class StepLane:
    """Pinned memory of a step.

    staged: its inputs. chosen: its tokens, as CHOICE_OUTPUTS orders them. done: an event after the last step that used
    the lane. limits, scratch_blocks, scratch_slot: see DecodeInputs. prompts: the buckets of other steps; None if only
    decodes have buckets.
    """

    def __init__(
        self,
        limits: Limits,
        staged: Tensor,
        chosen: Tensor,
        done: Event,
        scratch_blocks: Sequence[int],
        scratch_slot: int,
        prompts: PromptSizes | None = None,
    ) -> None:
        self.staged, self.chosen, self.done = staged, chosen, done
        self._memory: npt.NDArray[np.uint8] = staged.numpy()
        room = self._memory, scratch_blocks, scratch_slot
        self._decodes = DecodeInputs(limits, *room)
        self._prompts = None if prompts is None else PromptInputs(limits, prompts, *room)

    def write(self, step: Step, choices: RowChoices | None) -> StepShape | None:
        """Write a step padded to its bucket; returns the shape. None, and nothing is written, for one without."""
        self.done.synchronize()
        shape = self._decodes.write(step, choices)
        if shape is None and self._prompts is not None:
            shape = self._prompts.write(step, choices)
            if shape is not None:
                self._decodes.lose()
        return shape

    def pack(self, step: Step, shape: StepShape, choices: RowChoices | None = None) -> None:
        """Write any step."""
        self.done.synchronize()
        pack_inputs(step, shape, self._memory, choices)
        self._decodes.lose()
