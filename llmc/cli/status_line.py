"""A transient line on standard error: the current activity of a verb and its duration.

Without a terminal there is a line every ten seconds instead.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from llmc.cli.told_progress import told


@contextmanager
def status_line(first: str) -> Iterator[Callable[[str], None]]:
    """Show `first`, then each text that the returned function is called with."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    bars = Progress(*columns, console=Console(stderr=True), transient=True)
    with told(bars):
        task = bars.add_task(first, total=None)
        yield lambda now: bars.update(task, description=now)
