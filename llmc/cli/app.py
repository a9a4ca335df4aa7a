"""The `llmc` command: its verbs, and how errors reach the user."""

import atexit
import importlib
import os
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from llmc.cli.flag_names import flags_of, with_flags
from llmc.cli.help_text import WIDTH, GroupHelp, VerbHelp
from llmc.cli.missing_package import missing_package
from llmc.cli.option_group import expand_groups
from llmc.cli.other_verbs import refuse_other_verb
from llmc.cli.shown_warnings import show_warnings_plainly
from llmc.errors import LlmcError
from llmc.files.storage_error import full_disk_told

INTERRUPTED = 130

PANELS = {
    "Build and run": ("build", "export", "run", "chat", "serve", "tune", "train-medusa", "targets", "models", "env"),
    "Inspect an engine": ("inspect", "report", "viz", "profile", "verify", "ptx"),
    "Inspect the passes": ("passes", "prove", "explain", "simulate", "diff", "bisect"),
}
# A verb named here is a file with subcommands.
GROUPS = {"bench": "Build and run", "cache": "Build and run"}


def command_line(verb: str | None = None) -> typer.Typer:
    """The command with all its verbs, or only the verb that the command line names, if it exists.

    Importing all of them takes longer than an engine takes to its first token.
    """
    app = typer.Typer(
        name="llmc",
        cls=GroupHelp,
        help="An ahead-of-time compiler for LLM inference: model in, self-contained engine directory out.",
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": WIDTH},
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback()(_of_every_verb)
    panels = {name: panel for panel, names in PANELS.items() for name in names}
    known = {**panels, **GROUPS}
    for name in (verb,) if verb in known else known:
        file = name.replace("-", "_")
        module = importlib.import_module(f"llmc.cli.{file}")
        if name in GROUPS:
            app.add_typer(getattr(module, name), rich_help_panel=GROUPS[name])
        else:
            app.command(name, cls=VerbHelp, rich_help_panel=panels[name])(expand_groups(getattr(module, file)))
    return app


def _show_version(wanted: bool) -> None:
    if wanted:
        import llmc

        print(f"llmc {llmc.__version__}")
        raise typer.Exit


def _of_every_verb(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="show llmc's version")
    ] = False,
) -> None:
    """Options of the command itself."""


def run_process() -> NoReturn:
    """Run the command line and exit the process."""
    code: int | str | None = 0
    try:
        main()
    except SystemExit as leave:
        code = leave.code
    # Exit the process without freeing a million objects, which would take 1.3 to 1.6 of a warm build's 7 s.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)


def main() -> None:
    """Run the command line. LlmcError: its exit code and one clean message; its traceback with LLMC_DEBUG=1."""
    show_warnings_plainly()
    try:
        with full_disk_told(Path()):
            verb = asked_verb()
            refuse_other_verb(verb)
            command_line(verb)(standalone_mode=True)
    except (LlmcError, ModuleNotFoundError) as error:
        shown = error if isinstance(error, LlmcError) else missing_package(error)
        if shown is None or os.environ.get("LLMC_DEBUG") == "1":
            raise
        show_error(with_flags(shown, _flags(asked_verb())))
        sys.exit(shown.exit_code)
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted")
        sys.exit(INTERRUPTED)


def _flags(verb: str | None) -> dict[str, str]:
    """Flags of a verb by keyword; empty for an unknown verb."""
    commands: Any = typer.main.get_command(command_line(verb))
    return flags_of(commands.commands[verb]) if verb in commands.commands else {}


def asked_verb() -> str | None:
    """The first word after `llmc` on this command line, or on the one that a shell completes; None if there is none."""
    line = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS")
    words = sys.argv if line is None or "_LLMC_COMPLETE" not in os.environ else line.split()
    return words[1] if len(words) > 1 else None


def show_error(error: LlmcError) -> None:
    """Print the problem, the place and the fix, one line each, on standard error."""
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print("[bold red]error:[/] ", end="")
    console.print(error.problem, markup=False)
    for label, text in (("at", error.at), ("fix", error.fix)):
        if text is not None:
            console.print(f"  [bold]{label}:[/] ", end="")
            console.print(text, markup=False)
