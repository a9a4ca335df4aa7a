"""The `llmc` command: its verbs, and how errors reach the user."""

from __future__ import annotations

import os
import sys

import typer
from rich.console import Console

from llmc.cli.bench import bench
from llmc.cli.build import build
from llmc.cli.chat import chat
from llmc.cli.env import env
from llmc.cli.inspect import inspect
from llmc.cli.passes import passes
from llmc.cli.run import run
from llmc.cli.serve import serve
from llmc.cli.targets import targets
from llmc.cli.tune import tune
from llmc.cli.verify import verify
from llmc.errors import LlmcError

USER_ERROR = 2
INTERRUPTED = 130

app = typer.Typer(
    name="llmc",
    help="An ahead-of-time compiler for LLM inference: model in, self-contained engine directory out.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
for verb in (build, run, chat, serve, verify, inspect, tune, passes, targets, env):
    app.command(verb.__name__)(verb)
app.add_typer(bench)


def main() -> None:
    """Run the command line. LlmcError: exit code 2 and one clean message; its traceback with LLMC_DEBUG=1."""
    try:
        app(standalone_mode=True)
    except LlmcError as error:
        if os.environ.get("LLMC_DEBUG") == "1":
            raise
        report(error)
        sys.exit(USER_ERROR)
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted")
        sys.exit(INTERRUPTED)


def report(error: LlmcError) -> None:
    """One line of problem, one of place, one of fix, on standard error."""
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print("[bold red]error:[/] ", end="")
    console.print(error.problem, markup=False)
    for label, text in (("at", error.at), ("fix", error.fix)):
        if text is not None:
            console.print(f"  [bold]{label}:[/] ", end="")
            console.print(text, markup=False)
