"""Verbs that users of other tools try."""

from __future__ import annotations

import re

import pytest
import typer.main

from llmc.cli.app import command_line
from llmc.cli.other_verbs import _INSTEAD
from tests.cli.command import assert_user_error, llmc


@pytest.mark.parametrize("verb", ["list", "pull", "ps", "rm", "show", "quantize"])
def test_a_verb_of_another_tool_names_what_does_the_same(verb: str) -> None:
    assert_user_error(llmc(verb, "anything"), f"llmc has no verb '{verb}'")


def test_what_is_named_exists() -> None:
    verbs = typer.main.get_command(command_line()).commands  # type: ignore[attr-defined]
    assert not set(_INSTEAD) & set(verbs)
    named = {word for text in _INSTEAD.values() for word in re.findall(r"`llmc (\w+)", text)}
    assert named and named <= set(verbs)
