"""Python imports this when it starts in a process whose PYTHONPATH has this folder: a server that is held.

Each step of its engine takes a byte from the pipe that $HELD_STEPS names, and waits until there is one.
"""

from __future__ import annotations

import os


def _hold(pipe: str) -> None:
    from llmc.runtime.loop.step_loop import StepLoop
    from llmc.runtime.scheduling.step_plan import StepPlan

    # Also for writing: without another writer reading would not wait.
    steps, step = os.open(pipe, os.O_RDWR), StepLoop.step

    def held(loop: StepLoop) -> StepPlan:
        os.read(steps, 1)
        return step(loop)

    StepLoop.step = held  # type: ignore[assignment, method-assign]


if "HELD_STEPS" in os.environ:
    _hold(os.environ["HELD_STEPS"])
