"""Where work is, without a terminal."""

from __future__ import annotations

import io
import time

from rich.console import Console
from rich.progress import Progress

from llmc.cli.told_progress import told, where

ENOUGH = 30.0


def test_lines_say_where_work_is_without_a_terminal() -> None:
    out = io.StringIO()
    bars = Progress(console=Console(file=out), transient=True)
    started = time.monotonic()
    with told(bars, every=0.01):
        bars.advance(bars.add_task("passes", total=4), 2)
        while "passes: 50%, for" not in out.getvalue() and time.monotonic() - started < ENOUGH:
            time.sleep(0.01)
    assert "passes: 50%, for 0 s" in out.getvalue()


def test_what_is_finished_is_not_where_work_is() -> None:
    bars = Progress(console=Console(file=io.StringIO()))
    assert where(bars) is None
    bars.advance(bars.add_task("capture", total=1), 1)
    assert where(bars) is None
    bars.add_task("lower", total=None)
    assert where(bars) == "lower: for 0 s"
