"""A contestant in a process of its own, which prepares at once and measures in its turn."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Sequence
from queue import Empty, Queue

from benchmarks.gpu.measurement import parse
from benchmarks.gpu.outcome import Outcome

READY, GO = "ready", "go"


class Contestant:
    """A process that prepares, prints READY, reads a line GO, and prints its measurements.

    end: of all waiting, by time.monotonic().
    """

    def __init__(self, label: str, command: Sequence[str], end: float) -> None:
        self._label, self._end, self._start = label, end, time.monotonic()
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._lines: Queue[str | None] = Queue()
        self._output: list[str] = []
        self._is_ready = self._has_ended = False
        threading.Thread(target=self._read, daemon=True).start()

    def prepared(self) -> float | None:
        """Wait until it is ready; the seconds since its start, or None if it never is."""
        while not self._is_ready and (line := self._next_line()) is not None:
            self._is_ready = line.strip() == READY
        return time.monotonic() - self._start if self._is_ready else None

    def measured(self) -> Outcome:
        """Let it measure, and wait for its end."""
        begin = time.monotonic()
        if self.prepared() is not None:
            assert self._process.stdin is not None
            self._process.stdin.write(f"{GO}\n")
            self._process.stdin.flush()
            while self._next_line() is not None:
                pass
        try:
            code = self._process.wait(max(0.0, self._end - time.monotonic()))
            status = "ok" if code == 0 else f"failed with exit code {code}"
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = "timed out"
        found = tuple(m for m in map(parse, self._output) if m is not None)
        tail = "" if status == "ok" else "".join(self._output[-30:])
        return Outcome(self._label, status, time.monotonic() - begin, found, tail)

    def _next_line(self) -> str | None:
        if self._has_ended:
            return None
        try:
            line = self._lines.get(timeout=max(0.0, self._end - time.monotonic()))
        except Empty:
            return None
        self._has_ended = line is None
        return line

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._output.append(line)
            self._lines.put(line)
        self._lines.put(None)
