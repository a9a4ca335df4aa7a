"""Arguments that a form writes as plain text, as the JSON values that the function's schema makes of them."""

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from llmc.runtime.server.tool_calls.literals import PYTHON, NotLiteral, value_of
from llmc.runtime.server.tool_calls.tools import Function

# How Python writes them, which some templates do.
_WORDS = {"True": True, "False": False, "None": None}


def is_plain(function: Function, name: str) -> bool:
    """Whether an argument is a text, whatever it says."""
    return function.types(name) == ("string",)


def typed_value(text: str, function: Function, name: str) -> Any:
    """The value of an argument: the first of its types, in the schema's order, that the text can be.

    A text that is not a value of any of them stays a string. An argument without a type is parsed as JSON.
    """
    for value in function.values(name):
        if text == (value if isinstance(value, str) else json.dumps(value)):
            return value
    types = function.types(name)
    value = _value(text.strip())
    if "null" in types and value is None:
        return None
    for kind in types or ("",):
        if kind == "string":
            return text
        typed = value if _TYPES.get(kind, _is_not_text)(value) else text
        if typed is not text:
            return int(typed) if kind == "integer" else typed
    return None if value is None and types else text


def _value(text: str) -> Any:
    if text in _WORDS:
        return _WORDS[text]
    try:
        return json.loads(text, parse_constant=_finite, parse_float=_finite)
    except (ValueError, RecursionError):
        pass
    # Templates that write an object as Python's own text for it teach models to do so.
    try:
        return value_of(text, PYTHON) if text[:1] in ("{", "[") else text
    except NotLiteral:
        return text


def _finite(literal: str) -> float:
    number = float(literal)
    if not math.isfinite(number):
        raise ValueError(f"JSON has no {literal}")
    return number


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_not_text(value: Any) -> bool:
    return not isinstance(value, str)


_TYPES: Mapping[str, Callable[[Any], bool]] = {
    "integer": lambda value: _is_number(value) and value == int(value),
    "number": _is_number,
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, Mapping),
}
