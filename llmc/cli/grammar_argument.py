"""A grammar as it is named on the command line: a file, or a word that says what kind the rest is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from llmc.errors import OptionError

if TYPE_CHECKING:
    from llmc.runtime.grammar.grammar import Grammar

FORMS = "schema.json, grammar.lark or .gbnf, json (any object), regex:EXPRESSION, choice:A|B"


def read_grammar(text: str) -> Grammar:
    """The grammar that one of FORMS names. Raises OptionError; what the grammar says is checked when it is compiled."""
    from llmc.runtime.grammar.grammar import Grammar, GrammarKind

    word, colon, rest = text.partition(":")
    if text == "json":
        return Grammar(GrammarKind.JSON_OBJECT)
    if colon and word == "regex":
        return Grammar(GrammarKind.REGEX, rest)
    if colon and word == "choice":
        return Grammar(GrammarKind.CHOICE, json.dumps(rest.split("|")))
    kinds = {
        ".json": GrammarKind.JSON_SCHEMA,
        ".lark": GrammarKind.EBNF,
        ".gbnf": GrammarKind.EBNF,
        ".ebnf": GrammarKind.EBNF,
        ".regex": GrammarKind.REGEX,
    }
    kind = kinds.get(Path(text).suffix)
    if kind is None:
        raise OptionError(f"{text!r:.80} names no grammar", at="--grammar", fix=f"give {FORMS}")
    try:
        source = Path(text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise OptionError(f"the grammar cannot be read: {error}", at=f"--grammar {text}", fix=f"give {FORMS}") from None
    return Grammar(kind, source.strip() if kind is GrammarKind.REGEX else source)
