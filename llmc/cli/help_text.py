"""The text of --help: options under headings, in plain text, so that no name is ever cut."""

import re
from collections import defaultdict
from typing import Any

from typer.core import TyperCommand, TyperGroup

_OPTIONS, _ARGUMENTS, _COMMANDS = "Options", "Arguments", "Commands"
# A help text in one column and names in the other: wider lines are hard to read.
WIDTH = 100


class VerbHelp(TyperCommand):
    """A verb whose options are grouped in panels."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        write_options(self, ctx, formatter)


class GroupHelp(TyperGroup):
    """A command with verbs, each described by its whole first paragraph."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        write_options(self, ctx, formatter)
        rows: dict[str, list[tuple[str, str]]] = defaultdict(list)
        for name in self.list_commands(ctx):
            verb: Any = self.get_command(ctx, name)
            rows[verb.rich_help_panel or _COMMANDS].append((name, _first_paragraph(verb.help or "")))
        _write(formatter, rows)


def write_options(command: Any, ctx: Any, formatter: Any) -> None:
    """Arguments, then options without a panel, then the panels in the order of their first option."""
    rows: dict[str, list[tuple[str, str]]] = {_ARGUMENTS: [], _OPTIONS: []}
    for param in command.get_params(ctx):
        record = param.get_help_record(ctx)
        if record is not None:
            heading = _ARGUMENTS if param.param_type_name == "argument" else param.rich_help_panel or _OPTIONS
            rows.setdefault(heading, []).append((_without_list(record[0]), record[1]))
    _write(formatter, rows)


def _write(formatter: Any, rows: dict[str, list[tuple[str, str]]]) -> None:
    for heading, definitions in rows.items():
        if definitions:
            with formatter.section(heading):
                formatter.write_dl(definitions)


def _without_list(names: str) -> str:
    """`--stop <list[str]>` completes one text at a time, so a line of choices is merged into the adjacent text."""
    return re.sub(r" <[^>]{60,}>", "", re.sub(r"<list\[(\w+)\]>", r"<\1>", names))


def _first_paragraph(text: str) -> str:
    return " ".join(text.partition("\n\n")[0].split())
