"""An executor that takes its time, so that something can happen during a step, and that can break."""

from __future__ import annotations

import time
from collections.abc import Mapping

from llmc.runtime.engine import Engine
from llmc.runtime.executors.executor import Executor, Logits
from llmc.runtime.step import Step


class SlowExecutor:
    """Another executor with a pause in each step."""

    def __init__(self, inner: Executor, seconds: float) -> None:
        self.inner, self.seconds = inner, seconds
        self.broken = False

    def step(self, step: Step) -> Logits:
        time.sleep(self.seconds)
        if self.broken:
            raise RuntimeError("the device fell off the bus")
        return self.inner.step(step)

    def copy_blocks(self, copies: Mapping[int, int]) -> None:
        self.inner.copy_blocks(copies)

    def close(self) -> None:
        self.inner.close()


def slow(engine: Engine, seconds: float) -> SlowExecutor:
    """Slow an engine down."""
    executor = SlowExecutor(engine.loop._executor, seconds)
    engine.loop._executor = executor
    return executor
