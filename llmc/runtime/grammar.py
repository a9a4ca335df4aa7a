"""What an output has to look like: a JSON schema, a regular expression, a choice of texts, or a grammar."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class GrammarKind(Enum):
    """JSON_SCHEMA: source is the schema as JSON text. JSON_OBJECT: any JSON object; source is empty.
    REGEX: source is the expression. CHOICE: source is a JSON list of texts. EBNF: source is a grammar, in Lark's or in
    llama.cpp's (GBNF) notation."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICE = "choice"
    EBNF = "ebnf"


@dataclass(frozen=True)
class Preamble:
    """Any text that comes before what a grammar is about, such as a model's thinking.

    opening, closing: its marks, as text or as the id of a special token. With an opening of None it has begun already;
    otherwise an output may do without it.
    """

    opening: str | int | None
    closing: str | int


@dataclass(frozen=True)
class Grammar:
    """A constraint for SamplingParams(grammar=...). It is compiled when the request is submitted.

    preamble: the constraint holds for what comes after it; None for the whole output.
    """

    kind: GrammarKind
    source: str = ""
    preamble: Preamble | None = None
