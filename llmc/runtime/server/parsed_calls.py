"""Tool calls in JSON: whole ones, and one that an output broke off in."""

import json
import re
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

_BEGUN = re.compile(
    r'\{\s*"name"\s*:\s*(?P<name>"(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?P<arguments>.*)', re.DOTALL
)
_BETWEEN = "[,; \t\r\n"


@dataclass(frozen=True)
class ParsedCall:
    """A function's name and its arguments as JSON text."""

    name: str
    arguments: str


def parse_calls(text: str, names: frozenset[str]) -> list[ParsedCall]:
    """The calls in JSON: an object, a list of them, or several after each other or with semicolons between.

    Empty if any of it is not a call of a known function.
    """
    decoder, calls, at = json.JSONDecoder(), [], 0
    while (at := _skip(text, at)) < len(text):
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return []
        for item in value if isinstance(value, list) else [value]:
            call = as_call(item)
            if call is None or call.name not in names:
                return []
            calls.append(call)
    return calls


def cut_calls(text: str, names: Container[str]) -> tuple[list[ParsedCall], str]:
    """(the calls, the last of them perhaps with part of its arguments; the text after them that is none).

    Arguments that are cut are given as OpenAI gives them: what there is, which is no JSON, and finish_reason `length`.
    text: JSON objects, each a call, from the beginning of one. names: of the known functions.
    """
    decoder, calls, rest = json.JSONDecoder(), list[ParsedCall](), text
    while True:
        begun = rest.lstrip(_BETWEEN)
        if not begun:
            return calls, ""
        value: Any
        try:
            value, end = decoder.raw_decode(begun)
        except (ValueError, RecursionError):
            break
        call = as_call(value)
        if call is None or call.name not in names:
            return calls, rest
        calls.append(call)
        rest = begun[end:]
    found = _BEGUN.match(begun)
    if found is None:
        return calls, rest
    name = _text(found["name"])
    if name not in names:
        return calls, rest
    return [*calls, ParsedCall(name, found["arguments"])], ""


def _text(literal: str) -> str:
    try:
        return str(json.loads(literal))
    except ValueError:
        return ""


def as_call(item: Any) -> ParsedCall | None:
    """The call that a JSON object is; None if it is none."""
    if not isinstance(item, dict) or not isinstance(item.get("name"), str):
        return None
    arguments = item.get("arguments", item.get("parameters", {}))
    if isinstance(arguments, str):
        return ParsedCall(item["name"], arguments)
    return ParsedCall(item["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None


def _skip(text: str, at: int) -> int:
    while at < len(text) and (text[at].isspace() or text[at] == ";"):
        at += 1
    return at
