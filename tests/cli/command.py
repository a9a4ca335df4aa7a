"""Run the llmc command in this process, as its entry point does."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from llmc.cli.app import main

MODEL = Path(__file__).parent.parent.parent / "examples" / "models" / "bard-draft"


@dataclass(frozen=True)
class Outcome:
    """Exit code and what was printed."""

    code: int
    out: str
    err: str


def llmc(*arguments: str | Path) -> Outcome:
    """`llmc arguments…`."""
    out, err = io.StringIO(), io.StringIO()
    with _argv(["llmc", *map(str, arguments)]), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
            code = 0
        except SystemExit as leave:
            code = leave.code if isinstance(leave.code, int) else 0
    return Outcome(code, out.getvalue(), err.getvalue())


def assert_user_error(outcome: Outcome, *parts: str) -> None:
    """Exit code 2 and one clean message: a line of problem, of place, of fix; each of `parts` is in it."""
    assert outcome.code == 2, outcome
    assert "Traceback" not in outcome.err + outcome.out
    message = outcome.err[outcome.err.index("error:") :]
    assert message.count("error:") == 1
    assert "  fix: " in message, message
    for part in parts:
        assert part in message, f"{part!r} is not in:\n{message}"


@contextlib.contextmanager
def _argv(arguments: list[str]) -> Iterator[None]:
    before, sys.argv = sys.argv, arguments
    try:
        yield
    finally:
        sys.argv = before
