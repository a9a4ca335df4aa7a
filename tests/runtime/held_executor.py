"""An executor that stops before each step until it is let go, so that something can happen meanwhile; it can break."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from llmc.runtime.engine import Engine
from llmc.runtime.executors.executor import Executor, Logits
from llmc.runtime.loop.step import Ints, Step


class HeldExecutor:
    """Another executor. reached: released when a step begins and has to wait. may_go: acquired by a step that waits.

    error: raised by the next step, once. tokens: how many requests each step had.
    """

    def __init__(self, inner: Executor) -> None:
        self.inner = inner
        self.reached = threading.Semaphore(0)
        self.may_go = threading.Semaphore(0)
        self.is_free = False
        self.error: BaseException | None = None
        self.tokens: list[int] = []

    def step(self, step: Step) -> Logits:
        if not self.is_free:
            self.reached.release()
            self.may_go.acquire()
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        self.tokens.append(len(step.context_lens))
        return self.inner.step(step)

    def copy_blocks(self, copies: Mapping[int, int], group: int = 0) -> None:
        self.inner.copy_blocks(copies, group)

    def move_slots(self, sources: Ints, destinations: Ints, group: int = 0) -> None:
        self.inner.move_slots(sources, destinations, group)

    def close(self) -> None:
        self.inner.close()

    def free(self) -> None:
        """Stop no more."""
        self.is_free = True
        self.may_go.release()


def hold(engine: Engine) -> HeldExecutor:
    """Let an engine's steps wait."""
    executor = HeldExecutor(engine.loop.executor)
    engine.loop.executor = executor
    return executor
