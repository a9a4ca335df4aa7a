"""Only the contestant whose turn it is runs; the others' processes are stopped.

Some peers spin for seconds after they have answered (vLLM's worker for three), and whoever was measured next, on the
same cores, would be slower by it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def turn(process_group: int) -> Iterator[None]:
    """Let a stopped group of processes run for the length of the block."""
    _signal(process_group, signal.SIGCONT)
    try:
        yield
    finally:
        stop(process_group)


def stop(process_group: int) -> None:
    """Let none of the group run until its turn."""
    _signal(process_group, signal.SIGSTOP)


def end(process_group: int) -> None:
    """Kill the group: peers' workers would go on holding memory and cores."""
    _signal(process_group, signal.SIGKILL)


def _signal(process_group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # it may have ended by itself
        os.killpg(process_group, number)
