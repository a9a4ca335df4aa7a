"""Progress of a long call: a bar in the terminal, or a function of the caller."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from llmc.errors import RequestError

Told = Callable[[int, int], None]
# True: a bar on standard error. A function: is called with how many are done, and of how many.
Progress = bool | Told


@contextmanager
def telling(progress: Progress, total: int, what: str = "prompts") -> Iterator[Told | None]:
    """Yield the progress callback, or None if progress is off; a bar is shown until the end. what: its label."""
    if progress is False:
        yield None
    elif progress is True:
        with _bar(total, what) as advance:
            yield advance
    elif callable(progress):
        yield progress
    else:
        raise RequestError(
            f"progress cannot be {progress!r:.80} ({type(progress).__name__})",
            at="progress",
            fix="give True for a bar, or a function of (done, total)",
        )


@contextmanager
def _bar(total: int, what: str) -> Iterator[Told]:
    from rich import progress as bars
    from rich.console import Console

    columns = (bars.BarColumn(), bars.MofNCompleteColumn(), bars.TimeElapsedColumn(), bars.TimeRemainingColumn())
    with bars.Progress(bars.TextColumn(what), *columns, console=Console(stderr=True)) as shown:
        task = shown.add_task(what, total=total)
        yield lambda done, _: shown.update(task, completed=done)
