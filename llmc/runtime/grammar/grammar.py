"""Constraints on outputs: a JSON schema, a regular expression, a choice of texts, or a grammar."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from llmc.errors import RequestError, did_you_mean


class GrammarKind(Enum):
    """The kind of a grammar, which defines its source.

    Attributes:
        JSON_SCHEMA: The source is the schema as JSON text.
        JSON_OBJECT: Any JSON object; the source is empty.
        REGEX: The source is a regular expression.
        CHOICE: The source is a JSON list of texts.
        EBNF: The source is a grammar in the notation of Lark or llama.cpp (GBNF).
    """

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICE = "choice"
    EBNF = "ebnf"


# Where only one text may follow, llguidance allows its first token in the tokenizer's own split of that text, unless a
# Lark grammar begins with this: models were trained on tokens that continue past the text.
TOKENS_AS_THEY_COME = '%llguidance {"no_forcing": true}'
# A piece of text, or the id of a special token, which is not text.
Mark = str | int
Marks = tuple[Mark, ...]


@dataclass(frozen=True)
class Preamble:
    """Free text before the part that a grammar constrains, such as a model's reasoning.

    Attributes:
        opening: The mark that opens it. None means that the prompt has opened it; otherwise it is optional.
        closing: The mark that closes it.
        repeats: Whether several may follow each other.
        heading: Marks between it and the sentence of the grammar.
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

    Attributes:
        kind: The kind of the source.
        source: The source, as text.
        preamble: Free text before the constrained part; None constrains the whole output.
        instead: A grammar in Lark's notation. The text after the preamble, without its heading, may be a sentence of it
            instead.
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
        """Describe a constraint on an output; it is compiled when a request uses it.

        Args:
            kind: A GrammarKind or its value, such as "regex". "json" is a schema, and "grammar" is EBNF.
            source: The grammar's text. A schema may also be a dict, and a choice a list of texts. "json" without a
                source means any JSON object.
            preamble: Free text before the constrained part.
            instead: An alternative grammar in Lark's notation.

        Raises:
            RequestError: For an unknown kind, or a source of the wrong type.
        """
        checked_kind = _kind(kind)
        if checked_kind is GrammarKind.JSON_SCHEMA and kind == "json" and isinstance(source, str) and not source:
            checked_kind = GrammarKind.JSON_OBJECT
        object.__setattr__(self, "kind", checked_kind)
        object.__setattr__(self, "source", _text(checked_kind, source))
        object.__setattr__(self, "preamble", preamble)
        object.__setattr__(self, "instead", instead)

    def as_json(self) -> dict[str, Any]:
        """Convert the grammar to plain data.

        Returns:
            A dict that `grammar_of_json` reads.
        """
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
