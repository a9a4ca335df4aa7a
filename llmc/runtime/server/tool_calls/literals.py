"""Values as Python or Gemma writes them, in text that comes piece by piece."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llmc.runtime.text.incoming import Incoming, Wait

_DEEPEST = 64
_ESCAPE = re.compile(r"x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U000[0-9a-fA-F]{5}|U0010[0-9a-fA-F]{4}")
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_ESCAPE_LENGTHS = {"x": 3, "u": 5, "U": 9}
_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_MOST_DIGITS = 400
_CLOSINGS = {"[": "]", "(": ")"}
Say = Callable[[str], None]


class NotLiteral(Exception):
    """The text is not a value."""


@dataclass(frozen=True)
class Dialect:
    """A notation of literals. quotes: The marks around strings. escapes: whether a backslash means something in
    them."""

    quotes: tuple[str, ...]
    escapes: bool


PYTHON = Dialect(('"""', "'''", '"', "'"), escapes=True)
GEMMA = Dialect(('<|"|>', '"'), escapes=False)
FUNCTION_GEMMA = Dialect(("<escape>", '"'), escapes=False)


def read_value(source: Incoming, dialect: Dialect, depth: int = 0) -> Wait[Any]:
    """Any value; a word without quotes is a text. Raises NotLiteral, also where the text ends before the value does."""
    if depth > _DEEPEST:
        raise NotLiteral
    yield from source.skip_blank()
    quote = yield from source.which(dialect.quotes)
    if quote is not None:
        parts: list[str] = []
        if not (yield from pass_text(source, quote, dialect, parts.append)):
            raise NotLiteral
        return "".join(parts)
    first = yield from source.next_character()
    if first in _CLOSINGS:
        source.at += 1
        return (yield from _items(source, dialect, _CLOSINGS[first], depth))
    if first == "{":
        source.at += 1
        return (yield from _members(source, dialect, depth))
    text, stop = yield from source.word((",", "]", "}", ")", ":"))
    if stop is None and (source.cut or not source.is_over):
        raise NotLiteral
    return _scalar(text.strip())


def pass_text(source: Incoming, quote: str, dialect: Dialect, say: Say) -> Wait[bool]:
    """Pass on the text of a string that starts with this quote; whether its end came."""
    source.at += len(quote)
    stops = (quote, "\\") if dialect.escapes else (quote,)
    while True:
        stop = yield from source.until(stops, say, drops=True)
        if stop is None:
            return False
        source.at += len(stop)
        if stop == quote:
            return True
        say((yield from _escaped(source)))


def _escaped(source: Incoming) -> Wait[str]:
    kind = yield from source.next_character()
    length = _ESCAPE_LENGTHS.get(kind, 1)
    while len(source.text) - source.at < length and not source.ended:
        yield
    code = source.text[source.at : source.at + length]
    if _ESCAPE.fullmatch(code):
        source.at += length
        return chr(int(code[1:], 16))
    source.at += len(kind)
    return _ESCAPED.get(kind, kind if kind in "\\'\"" else f"\\{kind}")


def _items(source: Incoming, dialect: Dialect, closing: str, depth: int) -> Wait[list[Any]]:
    items: list[Any] = []
    while not (yield from _at_end(source, closing)):
        items.append((yield from read_value(source, dialect, depth + 1)))
    return items


def _members(source: Incoming, dialect: Dialect, depth: int) -> Wait[dict[str, Any]]:
    members: dict[str, Any] = {}
    while not (yield from _at_end(source, "}")):
        key = yield from read_value(source, dialect, depth + 1)
        yield from source.skip_blank()
        if isinstance(key, dict | list) or not (yield from source.takes(":")):
            raise NotLiteral
        members[str(key)] = yield from read_value(source, dialect, depth + 1)
    return members


def _at_end(source: Incoming, closing: str) -> Wait[bool]:
    """Whether the bracket closes here; a comma before is read over."""
    yield from source.skip_blank()
    if (yield from source.takes(",")):
        yield from source.skip_blank()
    if not (yield from source.more()):
        raise NotLiteral
    return (yield from source.takes(closing))


def _scalar(text: str) -> Any:
    if not text:
        raise NotLiteral
    if text in _WORDS:
        return _WORDS[text]
    if len(text) > _MOST_DIGITS or not _NUMBER.fullmatch(text):
        return text
    try:
        return int(text)
    except ValueError:
        number = float(text)
        return number if abs(number) != float("inf") else text


def value_of(text: str, dialect: Dialect) -> Any:
    """The value that a whole text is. Raises NotLiteral."""
    source = Incoming()
    source.add(text)
    source.end(cut=False)
    reader = read_value(source, dialect)
    try:
        while True:
            next(reader)
    except StopIteration as done:
        if source.text[source.at :].strip():
            raise NotLiteral from None
        return done.value
