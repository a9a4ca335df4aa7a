"""Progress of a build on standard error: one bar per stage."""

from contextlib import ExitStack

from rich import progress as bars
from rich.console import Console

from llmc.cli.told_progress import told


class StageBars:
    """One progress bar a stage; a stage without a known total pulses. Nothing is shown until the first begins."""

    def __init__(self) -> None:
        self._bars = bars.Progress(
            bars.TextColumn("{task.description:<10}"),
            bars.BarColumn(),
            bars.TaskProgressColumn(),
            bars.TimeElapsedColumn(),
            console=Console(stderr=True),
        )
        self._shown = ExitStack()
        self._task: bars.TaskID | None = None

    def __enter__(self) -> "StageBars":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._task is None:
            return
        if kind is None:
            self._finish()
        self._shown.close()

    def stage(self, name: str, total: int | None) -> None:
        if self._task is None:
            self._shown.enter_context(told(self._bars))
        self._finish()
        self._task = self._bars.add_task(name, total=total)

    def advance(self, amount: int) -> None:
        if self._task is not None:
            self._bars.advance(self._task, amount)

    def _finish(self) -> None:
        if self._task is None:
            return
        total = self._bars.tasks[self._task].total or 1
        self._bars.update(self._task, total=total, completed=total)
        self._bars.stop_task(self._task)
