"""Servers whose engines take a step only when the test lets them: what has to be under way stays so until then."""

from __future__ import annotations

import fcntl
import os
import struct
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.runtime.server.conftest import LiveServer, serving

HOOK = Path(__file__).parent / "held_steps"


@dataclass(frozen=True)
class HeldSteps:
    """The pipe that steps are taken from, by all replicas of a server."""

    pipe: int

    def allow(self, steps: int = 1) -> None:
        """So many more, of whichever engine asks first."""
        os.write(self.pipe, bytes(steps))

    def until(self, holds: Callable[[], bool], steps: int) -> None:
        """One step after the other, at most so many, until `holds()`, which asks the server: it sees to what it has
        heard before it answers, so that no step comes too early however slow the machine is. While nobody has taken the
        last one, what would take it is still on its way."""
        taken = 0
        while not holds():
            if not self._waiting():
                assert taken < steps, f"not within {steps} steps"
                self.allow()
                taken += 1

    def _waiting(self) -> int:
        """Steps that were allowed and not taken."""
        (count,) = struct.unpack("i", fcntl.ioctl(self.pipe, termios.FIONREAD, bytes(4)))
        return int(count)


@contextmanager
def held_serving(
    engine: Path, directory: Path, *flags: str, failing_token: int | None = None
) -> Iterator[tuple[LiveServer, HeldSteps]]:
    """`serving`, held; the pipe is in the directory. failing_token: a step that reads it fails."""
    path = directory / "steps"
    os.mkfifo(path)
    pipe = os.open(path, os.O_RDWR)
    paths = os.pathsep.join(filter(None, (str(HOOK), os.environ.get("PYTHONPATH"))))
    try:
        failing = {} if failing_token is None else {"FAILING_TOKEN": str(failing_token)}
        with serving(engine, *flags, environment={"HELD_STEPS": str(path), "PYTHONPATH": paths, **failing}) as live:
            steps = HeldSteps(pipe)
            yield live, steps
            steps.allow(1 << 14)  # For what is still under way at its end.
    finally:
        os.close(pipe)
