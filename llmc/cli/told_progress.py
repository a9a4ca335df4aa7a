"""Progress on standard error: bars on a terminal, otherwise a line with the current state every ten seconds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread

from rich.progress import Progress

# Seconds between two lines.
EVERY = 10.0


@contextmanager
def told(bars: Progress, every: float = EVERY) -> Iterator[None]:
    """Show the bars; without a terminal, print the unfinished task every `every` seconds."""
    if bars.console.is_terminal:
        with bars:
            yield
        return
    ended = Event()
    lines = Thread(target=_print_lines, args=(bars, ended, every), name="progress lines", daemon=True)
    lines.start()
    try:
        with bars:
            yield
    finally:
        ended.set()
        lines.join()


def _print_lines(bars: Progress, ended: Event, every: float) -> None:
    while not ended.wait(every):
        if (line := where(bars)) is not None:
            bars.console.print(line, markup=False, highlight=False, soft_wrap=True)


def where(bars: Progress) -> str | None:
    """`passes: 51%, for 20 s` of the last task that has begun and is not finished; None if there is none."""
    running = [task for task in bars.tasks if task.started and not task.finished]
    if not running:
        return None
    task = running[-1]
    share = f" {task.percentage:.0f}%," if task.total else ""
    return f"{task.description}:{share} for {task.elapsed or 0.0:.0f} s"
