"""docs/serving.md names flags, routes and fields that exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import typer.main

from llmc.cli.app import command_line
from llmc.runtime.server.schemas.chat import ChatRequest
from llmc.runtime.server.schemas.completion import CompletionRequest
from llmc.runtime.server.schemas.field_notes import IGNORED, REFUSED
from llmc.runtime.server.schemas.responses import ResponsesRequest

# Values and parts of fields that the table names, too.
VALUES = {"json", "regex", "choice", "grammar", "effort"}
TEXT = (Path(__file__).parent.parent / "docs" / "serving.md").read_text(encoding="utf-8")


def flags_of(command: Any) -> set[str]:
    own = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    return own.union(*(flags_of(child) for child in getattr(command, "commands", {}).values()))


def test_flags_exist() -> None:
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", TEXT))
    assert named and named <= flags_of(typer.main.get_command(command_line())) | {"--help"}


def test_fields_exist() -> None:
    """And every one that exists is there, with what becomes of it."""
    table = TEXT[TEXT.index("## Fields") :].split("**Chat templates**")[0]
    named = set(re.findall(r"`([a-z_]+)`", table))
    known = {*IGNORED, *REFUSED}
    for body in (CompletionRequest, ChatRequest, ResponsesRequest):
        known |= body.model_fields.keys()
    assert known <= named <= known | VALUES


def test_the_picture_is_there() -> None:
    for name in re.findall(r"!\[[^]]*\]\(([^)]+)\)", TEXT):
        assert (Path(__file__).parent.parent / "docs" / name).is_file()
