"""Stands for the executor of an engine that this machine cannot run: everything but a step still works."""

from collections.abc import Mapping

from llmc.errors import TargetError
from llmc.runtime.executors.executor import Logits
from llmc.runtime.loop.step import Ints, Step


class AbsentExecutor:
    """Raises its error for whatever would need the machine. error: what is missing, and how to run the engine."""

    def __init__(self, error: TargetError) -> None:
        self.error = error

    def step(self, step: Step) -> Logits:
        raise self.error

    def copy_blocks(self, copies: Mapping[int, int], group: int = 0) -> None:
        raise self.error

    def move_slots(self, sources: Ints, destinations: Ints, group: int = 0) -> None:
        raise self.error

    def close(self) -> None:
        """There is nothing to free."""
