"""The limits that a grammar runs into, in the words of a request's error: never the library's dump of its state."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from llmc.errors import RequestError

if TYPE_CHECKING:
    from llguidance import LLParserLimits

_FIX = "simplify the grammar: fewer optional properties in an object, fewer alternatives, less recursion on the right"
# llguidance's message, whose first group is the limit, and the resource that the grammar exceeds.
_LIMITS = (
    (re.compile(r"Current row has \d+ items; max is (\d+)"), "items"),
    (re.compile(r"Too many items \(limit (\d+)"), "items for one token"),
    (re.compile(r"too many states: \d+ >= (\d+)"), "states of its lexer"),
    (re.compile(r"number of symbols\) too big \(limit for this grammar: (\d+)"), "symbols"),
    (re.compile(r"configuration \(grammar\) too big \(limit for this grammar: (\d+)"), "steps to build its lexer"),
    (re.compile(r"maximum relevance check fuel (\d+)"), "steps to build its lexer"),
)
# Nothing may come next, in llguidance's words.
_NOTHING = "NoExtension"
# A fault at a place in the grammar is not a limit, regardless of its words.
_PLACE = re.compile(r"(at )?\d+\(\d+\): ")
# Limits that are said without a figure.
_BARE_LIMITS = re.compile(r"fuel|too many|too big|too large|too complex|too deep", re.IGNORECASE)
# The parser's state, and lines of the grammar with their numbers.
_DUMP = re.compile(r"<(?:state|non-verbose)|\n *\d+ \| ")


class DeadEndError(RequestError):
    """The grammar allows no next token, and the text is not a sentence of it."""


def parser_limits() -> LLParserLimits:
    """llguidance's own, without the parser's state in its errors."""
    from llguidance import LLParserLimits

    return LLParserLimits(verbose_errors=False)


def refusal(reason: str) -> RequestError:
    """The error for a grammar that cannot be used. reason: llguidance's message."""
    needs = beyond(reason)
    if needs is not None:
        return RequestError(needs, at="grammar", fix=_FIX)
    return RequestError(
        f"the grammar cannot be used: {_first_words(reason)}",
        at="grammar",
        fix="correct or simplify the schema, expression or grammar",
    )


def limit_reached(reason: str, token: int) -> RequestError:
    """The error for a grammar that an output cannot follow beyond token number `token`, counted from 1."""
    if _NOTHING in reason:
        return DeadEndError(f"the grammar allows nothing at token {token}", at="grammar", fix="allow some text")
    cause = beyond(reason) or f"the grammar cannot go on: {_first_words(reason)}"
    return RequestError(f"{cause} at token {token}", at="grammar", fix=_FIX)


def beyond(reason: str) -> str | None:
    """Return a sentence on the limit that a grammar exceeds; None if llguidance's message `reason` is not about one."""
    for pattern, unit in _LIMITS:
        match = pattern.search(reason)
        if match is not None:
            return f"the grammar needs more than {int(match[1]):,} {unit}"
    return "the grammar is too large" if _BARE_LIMITS.search(reason) and not _PLACE.match(reason) else None


def _first_words(reason: str) -> str:
    """Return a reason without the state, or the lines of the grammar, that may follow."""
    return " ".join(_DUMP.split(reason)[0].split())[:300]
