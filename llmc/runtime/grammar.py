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
class Grammar:
    """A constraint for SamplingParams(grammar=...). It is compiled when the request is submitted."""

    kind: GrammarKind
    source: str = ""
