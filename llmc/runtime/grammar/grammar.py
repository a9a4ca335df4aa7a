"""Constraints on outputs: a JSON schema, a regular expression, a choice of texts, or a grammar."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from llmc.errors import RequestError, did_you_mean


class GrammarKind(Enum):
    """JSON_SCHEMA: source is the schema as JSON text. JSON_OBJECT: any JSON object; source is empty.
    REGEX: source is the expression. CHOICE: source is a JSON list of texts. EBNF: source is a grammar, in Lark's or in
    llama.cpp's (GBNF) notation."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICE = "choice"
    EBNF = "ebnf"


# Where one text alone may follow, llguidance allows its first token in the tokenizer's own split of that text, unless
# a Lark grammar begins with this: models were taught tokens that go on behind the text.
TOKENS_AS_THEY_COME = '%llguidance {"no_forcing": true}'
# A piece of text, or the id of a special token, which is not text.
Mark = str | int
Marks = tuple[Mark, ...]


@dataclass(frozen=True)
class Preamble:
    """Free text before the part that a grammar constrains, such as a model's thoughts.

    opening, closing: its marks. With an opening of None it has begun already; otherwise an output may do without it.
    repeats: several may follow each other. heading: what comes after it, and before a sentence of the grammar.
    """

    opening: Marks | None
    closing: Marks
    repeats: bool = False
    heading: Marks = ()


# As vLLM's structured outputs are called.
_ALIASES = {"json": GrammarKind.JSON_SCHEMA, "grammar": GrammarKind.EBNF}
_DATA = {GrammarKind.JSON_SCHEMA: Mapping, GrammarKind.CHOICE: Sequence}


@dataclass(frozen=True, init=False)
class Grammar:
    """A constraint for SamplingParams(grammar=...). It is compiled when the request is submitted.

    preamble: the constraint applies to the text after it; None constrains the whole output. instead: a grammar in
    Lark's notation; the text after the preamble, without its heading, may alternatively be a sentence of it.
    """

    kind: GrammarKind
    source: str
    preamble: Preamble | None
    instead: str | None

    def __init__(
        self,
        kind: GrammarKind | str,
        source: str | Mapping[str, Any] | Sequence[str] = "",
        preamble: Preamble | None = None,
        instead: str | None = None,
    ) -> None:
        """kind: a GrammarKind or its value, such as "regex"; "json" is a schema and "grammar" is EBNF.

        source: text; of a schema also the schema as a dict, of a choice also the list of texts. "json" without a source
        is any JSON object. Raises RequestError.
        """
        found = _kind(kind)
        if found is GrammarKind.JSON_SCHEMA and kind == "json" and isinstance(source, str) and not source:
            found = GrammarKind.JSON_OBJECT
        object.__setattr__(self, "kind", found)
        object.__setattr__(self, "source", _text(found, source))
        object.__setattr__(self, "preamble", preamble)
        object.__setattr__(self, "instead", instead)

    def as_json(self) -> dict[str, Any]:
        """As `grammar_of_json` takes it."""
        preamble = None if self.preamble is None else asdict(self.preamble)
        return {"kind": self.kind.value, "source": self.source, "preamble": preamble, "instead": self.instead}


def grammar_of_json(data: Mapping[str, Any]) -> Grammar:
    """The grammar that `Grammar.as_json` was called of."""
    preamble = data["preamble"]
    return Grammar(
        GrammarKind(data["kind"]),
        data["source"],
        None if preamble is None else Preamble(**preamble),
        data["instead"],
    )


def _kind(given: GrammarKind | str) -> GrammarKind:
    if isinstance(given, GrammarKind):
        return given
    known = {kind.value: kind for kind in GrammarKind} | _ALIASES
    if isinstance(given, str) and given in known:
        return known[given]
    raise RequestError(
        f"a grammar's kind cannot be {given!r:.80} ({type(given).__name__})",
        at="grammar",
        fix=f"{did_you_mean(str(given), known)}give a llmc.GrammarKind, or one of {', '.join(known)}",
    )


def _text(kind: GrammarKind, source: object) -> str:
    if isinstance(source, str) and (kind is not GrammarKind.CHOICE or _is_list(source)):
        return source
    if kind in _DATA and isinstance(source, _DATA[kind]) and not isinstance(source, str | bytes):
        try:
            return json.dumps(source)
        except (TypeError, ValueError, RecursionError):
            pass  # As wrong as any other.
    raise RequestError(
        f"the source of a {kind.value} grammar cannot be {source!r:.80} ({type(source).__name__})",
        at="grammar",
        fix="give a list of texts" if kind is GrammarKind.CHOICE else "give its text; of a JSON schema also a dict",
    )


def _is_list(text: str) -> bool:
    try:
        return isinstance(json.loads(text), list)
    except (ValueError, RecursionError):
        return False
