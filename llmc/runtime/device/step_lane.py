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
    the lane. limits, scratch_blocks, scratch_slot: see DecodeInputs.
    """

    def __init__(
        self,
        limits: Limits,
        staged: Tensor,
        chosen: Tensor,
        done: Event,
        scratch_blocks: Sequence[int],
        scratch_slot: int,
    ) -> None:
        self.staged, self.chosen, self.done = staged, chosen, done
        self._memory: npt.NDArray[np.uint8] = staged.numpy()
        self._decodes = DecodeInputs(limits, self._memory, scratch_blocks, scratch_slot)

    def write(self, step: Step, choices: RowChoices | None) -> StepShape | None:
        """Write a step of decodes, padded to a bucket; returns its shape. None, and nothing is written, for others."""
        self.done.synchronize()
        return self._decodes.write(step, choices)

    def pack(self, step: Step, shape: StepShape, choices: RowChoices | None = None) -> None:
        """Write any step."""
        self.done.synchronize()
        pack_inputs(step, shape, self._memory, choices)
        self._decodes.lose()
