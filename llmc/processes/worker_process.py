"""A process that answers JSON requests, one per line, and can be killed: for untrusted programs and grammars."""

import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from io import BufferedReader
from typing import IO, Any

from llmc.processes.lifeline import Lifeline
from llmc.processes.worker_command import minimal_environment, worker_command

START_SECONDS = 60.0


class WorkerError(Exception):
    """The worker gave no answer. The text says what happened, and follows a colon."""


class WorkerProcess:
    """Runs `python -m module arguments lifeline`, whose first line says that it is ready. One question at a time.

    It imports nothing from the current directory, its environment has no secrets of this process, and it ends
    with this process. lifeline: for llmc.processes.lifeline.end_with.
    """

    def __init__(self, module: str, arguments: Sequence[str]) -> None:
        self._lifeline = Lifeline()
        try:
            self._process = subprocess.Popen(
                worker_command(module, *arguments, str(self._lifeline.worker_end)),
                env=minimal_environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                pass_fds=(self._lifeline.worker_end,),
                process_group=0,  # With its children it can be killed at once; and Ctrl-C reaches only its parent.
            )
        finally:
            self._lifeline.started()
        assert self._process.stdin is not None and isinstance(self._process.stdout, BufferedReader)
        self._input: IO[bytes] = self._process.stdin
        self._output = self._process.stdout
        try:
            self._read(START_SECONDS, "its process did not start in time")
        except WorkerError:
            self.kill()
            raise

    def ask(self, question: object, seconds: float) -> dict[str, Any]:
        """The answer. Raises WorkerError if there is none in time; the worker is to be killed then."""
        try:
            self._input.write(json.dumps(question).encode() + b"\n")
            self._input.flush()
        except OSError:
            raise WorkerError("its process ended") from None
        return self._read(seconds, f"it did not finish within {seconds:.2g} seconds")

    def kill(self) -> None:
        """End the process and its children at once; a thread that waits for its answer gets a WorkerError."""
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._lifeline.close()

    def _read(self, seconds: float, late: str) -> dict[str, Any]:
        """Read one line, waiting for each part of it, because a worker could stop in the middle."""
        deadline = time.monotonic() + seconds
        line = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(self._output, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise WorkerError(late)
                part = self._output.read1(1 << 16)
                if not part:
                    raise WorkerError("it needs too much memory, or its process was ended")
                line += part
        answer: dict[str, Any] = json.loads(line)
        return answer
