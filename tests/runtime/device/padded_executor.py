"""PTX executors whose every step is padded as a CUDA executor pads it, and padding's memory beside that of requests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from llmc.engine_format import EngineDirectory
from llmc.engine_format.engine_files import EngineFiles
from llmc.program import CHOICE_INPUTS, Program, StepOutput
from llmc.runtime.device.adapter_tensors import with_adapters
from llmc.runtime.device.inputs import StepShape, largest_shape
from llmc.runtime.device.prompt_inputs import PromptSizes, prompt_sizes
from llmc.runtime.device.step_lane import StepLane
from llmc.runtime.executors import ptx
from llmc.runtime.executors.executor import Chosen, LaunchTime
from llmc.runtime.executors.stored_weights import stored_tensor
from llmc.runtime.loop.step import Step
from llmc.runtime.sampling.row_choice import RowChoices
from llmc.targets import gpu_target
from tests.runtime.device.staged_step import staged_input, staged_step


class PaddedPtxExecutor(ptx.PtxExecutor):
    """shapes: the buckets of the steps that ran; None for a step without one. sizes: the buckets of prompts."""

    def __init__(
        self,
        sizes: PromptSizes,
        program: Program,
        files: EngineFiles,
        weights: dict[str, Tensor],
        blocks: int,
        snapshots: int,
    ) -> None:
        counts = program.group_blocks(blocks)
        # Groups of windows grow more slowly than the first.
        larger = blocks + 1
        while any(more == own for more, own in zip(program.group_blocks(larger), counts, strict=True)):
            larger += 1
        super().__init__(program, files, weights, larger, snapshots + 1)
        self.snapshots = snapshots
        self.shapes: list[StepShape | None] = []
        largest = largest_shape(
            program.limits,
            program.hidden_width,
            adapters=program.adapters is not None,
            states=bool(program.states),
            groups=len(program.policies),
        )
        staged = torch.zeros(largest.input_offsets()["end"], dtype=torch.uint8)
        unused: Any = SimpleNamespace(synchronize=lambda: None)
        slot = program.limits.max_sequences + snapshots
        self._lane = StepLane(program.limits, staged, staged, unused, counts, slot, sizes)
        self._counts = counts
        self._choices: RowChoices | None = None

    def choose(self, step: Step, wanted: StepOutput, choices: RowChoices) -> Chosen:
        self._choices = choices
        try:
            return super().choose(step, wanted, choices)
        finally:
            self._choices = None

    def launch_all(self, step: Step, wanted: StepOutput) -> tuple[LaunchTime, ...]:
        step = (step if self._pools is None else with_adapters(step)).for_groups(self._counts[1:])
        shape = self._lane.write(step, self._choices)
        self.shapes.append(shape)
        if shape is None:
            return super().launch_all(step, wanted)
        staged = self._lane.staged.numpy()
        for name, dtype in CHOICE_INPUTS.items() if self._choices is not None else ():
            self._memory["input", name] = torch.from_numpy(
                staged_input(staged, shape, name, (shape.logit_rows,), dtype)
            )
        return super().launch_all(staged_step(staged, shape, step), wanted)


def pad_steps(monkeypatch: pytest.MonkeyPatch) -> list[PaddedPtxExecutor]:
    """Let engines of the executor `ptx` run padded steps. Returns the list of those that are opened."""
    made: list[PaddedPtxExecutor] = []

    def opened(engine: EngineDirectory, blocks: int, snapshots: int = 0) -> PaddedPtxExecutor:
        program = engine.program
        slots = zip(program.weights, engine.tensors, strict=True)
        weights = {slot.name: stored_tensor(engine, stored) for slot, stored in slots}
        sizes = prompt_sizes(program, gpu_target(engine.manifest.target.name))
        made.append(PaddedPtxExecutor(sizes, program, engine.files, weights, blocks, snapshots))
        return made[-1]

    monkeypatch.setattr(ptx, "open_ptx_rank", opened)
    return made
