"""JSON values in text that comes piece by piece: passed on as they come, to their own end."""

import json
import re
from collections.abc import Callable

from llmc.runtime.text.incoming import Incoming, Wait

_BRACKET = re.compile(r'["\[\]{}]')
_IN_STRING = re.compile(r'["\\\x00-\x1f]')
_SCALAR = re.compile(r"[^\s,\]}<\[{]*")
Say = Callable[[str], None]


def pass_brackets(source: Incoming, say: Say) -> Wait[None]:
    """Pass on an object or a list from its bracket to the one that closes it; marks within strings are text."""
    depth = 0
    while (yield from source.more()):
        match = _BRACKET.search(source.text, source.at)
        if match is None or match.start() > source.at:
            end = len(source.text) if match is None else match.start()
            say(source.text[source.at : end])
            source.at = end
        elif match[0] == '"':
            yield from pass_string(source, say)
        else:
            say(match[0])
            source.at += 1
            depth += 1 if match[0] in "[{" else -1
            if depth == 0:
                return


def pass_string(source: Incoming, say: Say) -> Wait[None]:
    """Pass on a string with its quotes. Line breaks and other control characters, which models do not escape, are
    escaped."""
    say('"')
    source.at += 1
    while (yield from source.more()):
        match = _IN_STRING.search(source.text, source.at)
        if match is None or match.start() > source.at:
            end = len(source.text) if match is None else match.start()
            say(source.text[source.at : end])
            source.at = end
        elif match[0] == '"':
            say('"')
            source.at += 1
            return
        elif match[0] != "\\":
            say(escaped(match[0]))
            source.at += 1
        else:
            source.at += 1
            follows = yield from source.next_character()
            source.at += len(follows)
            say("\\" + follows)


def read_string(source: Incoming) -> Wait[str]:
    """The text of a string."""
    parts: list[str] = []
    yield from pass_string(source, parts.append)
    literal = "".join(parts)
    try:
        return str(json.loads(literal))
    except ValueError:
        return literal.removeprefix('"').removesuffix('"')


def skip_value(source: Incoming) -> Wait[None]:
    """Read any value."""
    first = yield from source.next_character()
    if first == '"':
        yield from read_string(source)
    elif first in ("{", "["):
        yield from pass_brackets(source, lambda text: None)
    else:
        yield from source.take_while(_SCALAR)


def read_arguments(source: Incoming, begin: Callable[[], None], say: Say, empty: bool = False) -> Wait[bool]:
    """Pass on the arguments of a call: an object, null for none, or an object that is written as a string.

    begin: called once it is certain that these are arguments. empty: empty text also means no arguments. Returns
    whether they are arguments; otherwise nothing was consumed.
    """
    first = yield from source.next_character()
    if first == "{":
        begin()
        yield from pass_brackets(source, say)
    elif first == '"':
        begin()
        say((yield from read_string(source)).strip() or "{}")
    elif first == "" and source.cut:
        begin()
    elif (yield from source.takes("null")) or (yield from source.takes("None")) or (empty and first in ("", "<", "[")):
        begin()
        say("{}")
    else:
        return False
    return True


def escaped(text: str) -> str:
    """The text with the escapes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
