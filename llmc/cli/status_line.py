"""What a verb is doing and for how long, in a line on standard error that is gone when it is done."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


@contextmanager
def status_line(first: str) -> Iterator[Callable[[str], None]]:
    """Shows `first`, then whatever it is called with."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(first, total=None)
        yield lambda now: bars.update(task, description=now)
