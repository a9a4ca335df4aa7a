"""The stages that a build reports, with the time of each."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol


class Progress(Protocol):
    """The receiver of a build's progress."""

    def stage(self, name: str, total: int | None) -> None:
        """A stage begins (and the one before has ended); `total` units of work, None if unknown."""

    def advance(self, amount: int) -> None:
        """Report the completed amount of the stage's total."""


@dataclass
class Stages:
    """Passes stages on to a Progress and times them."""

    progress: Progress | None
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, name: str, total: int | None = None) -> Iterator[None]:
        if self.progress is not None:
            self.progress.stage(name, total)
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start

    def advance(self, amount: int) -> None:
        if self.progress is not None:
            self.progress.advance(amount)

    def count(self, name: str, done: int, total: int) -> None:
        """`done` of `total` steps of a part of a stage are done; the stage goes on when all are."""
        if self.progress is None:
            return
        if done == 0:
            self.progress.stage(name, total)
        elif done < total:
            self.progress.advance(1)
        else:
            self.progress.stage("passes", None)
