"""Python imports this when it starts in a process whose PYTHONPATH has this folder: a server that is held.

Each step of its engine takes a byte from the pipe that $HELD_STEPS names, and waits until there is one. A step that
reads the token id $FAILING_TOKEN raises, as one does whose device is lost.
"""

from __future__ import annotations

import os
from typing import Any


def _hold(pipe: str) -> None:
    from llmc.runtime.loop.step_loop import StepLoop
    from llmc.runtime.scheduling.step_plan import StepPlan

    # Also for writing: without another writer reading would not wait.
    steps, step = os.open(pipe, os.O_RDWR), StepLoop.step

    def held(loop: StepLoop) -> StepPlan:
        os.read(steps, 1)
        return step(loop)

    StepLoop.step = held  # type: ignore[assignment, method-assign]


def _fail(token: int) -> None:
    from llmc.runtime.executors.cpp import ChoosingCppExecutor, CppExecutor

    def failing(real: Any) -> Any:
        def step(executor: Any, step: Any, *given: Any) -> Any:
            if token in step.input_ids:
                raise RuntimeError("the device fell off the bus")
            return real(executor, step, *given)

        return step

    CppExecutor.step = failing(CppExecutor.step)  # type: ignore[method-assign]
    ChoosingCppExecutor.choose = failing(ChoosingCppExecutor.choose)  # type: ignore[method-assign]


if "HELD_STEPS" in os.environ:
    _hold(os.environ["HELD_STEPS"])
if "FAILING_TOKEN" in os.environ:
    _fail(int(os.environ["FAILING_TOKEN"]))
