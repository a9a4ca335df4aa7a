"""The `llmc` command: its verbs, and how errors reach the user."""

from __future__ import annotations

import atexit
import importlib
import os
import sys
from typing import NoReturn

import typer
from rich.console import Console

from llmc.cli.option_group import expand_groups
from llmc.errors import LlmcError

USER_ERROR = 2
INTERRUPTED = 130

BUILDING = ("build", "run", "chat", "serve", "verify", "inspect", "tune", "targets", "env")
DEBUGGING = ("report", "viz", "profile", "passes", "explain", "diff", "bisect")


def command_line(verb: str | None = None) -> typer.Typer:
    """The command with all its verbs, or with only the one that is asked for, if there is one of that name.

    Importing all of them takes longer than an engine takes to its first token.
    """
    app = typer.Typer(
        name="llmc",
        help="An ahead-of-time compiler for LLM inference: model in, self-contained engine directory out.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
    )
    app.callback()(_no_options_of_its_own)
    verbs = (*BUILDING, *DEBUGGING)
    for name in (verb,) if verb in verbs else verbs:
        app.command(name)(expand_groups(getattr(importlib.import_module(f"llmc.cli.{name}"), name)))
    if verb not in verbs:
        app.add_typer(importlib.import_module("llmc.cli.bench").bench)
    return app


def _no_options_of_its_own() -> None:
    """Makes Typer expect a verb even where it knows a single one."""


def run_process() -> NoReturn:
    """The command line as a process of its own, which ends here."""
    code: int | str | None = 0
    try:
        main()
    except SystemExit as leave:
        code = leave.code
    # What an orderly end does, but for taking apart a million objects: 1.3 to 1.6 s of a warm build's 7.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)


def main() -> None:
    """Run the command line. LlmcError: exit code 2 and one clean message; its traceback with LLMC_DEBUG=1."""
    try:
        command_line(sys.argv[1] if len(sys.argv) > 1 else None)(standalone_mode=True)
    except LlmcError as error:
        if os.environ.get("LLMC_DEBUG") == "1":
            raise
        show_error(error)
        sys.exit(USER_ERROR)
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted")
        sys.exit(INTERRUPTED)


def show_error(error: LlmcError) -> None:
    """One line of problem, one of place, one of fix, on standard error."""
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print("[bold red]error:[/] ", end="")
    console.print(error.problem, markup=False)
    for label, text in (("at", error.at), ("fix", error.fix)):
        if text is not None:
            console.print(f"  [bold]{label}:[/] ", end="")
            console.print(text, markup=False)
