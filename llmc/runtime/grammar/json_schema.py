"""JSON schemas as they are served: what a grammar cannot say is left out, with a note, as validators ignore what they
do not know.

Schemas are made by pydantic, zod and OpenAI's clients, which also write formats that are only annotations, patterns
with look-ahead, and bounds of 64 bits. A grammar can enforce the rest, and the client validates answers anyway.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from llmc.errors import RequestError

# llguidance's message for a keyword that it does not support.
_LACKS = re.compile(r"look-?around|backreferences are not supported|Failed to generate regex for")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
# Bounds of a smaller magnitude are always expressed.
_LARGE_BOUND = 10**15
# Keywords whose values are schemas: by name, a single one, or several.
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SINGLE = ("items", "additionalProperties", "additionalItems", "contains", "propertyNames", "not", "if", "then", "else")
_SEVERAL = ("items", "prefixItems", "anyOf", "oneOf", "allOf")
# Why a schema cannot be used; None if it can.
Fault = Callable[[Mapping[str, Any]], str | None]


def served_schema(source: str, fault_of: Fault) -> tuple[str, list[str]]:
    """The schema without the keywords that `fault_of` rejects, as text, and a note on each removed keyword.

    Raises RequestError for a schema that allows nothing, ValueError for text that is not JSON.
    """
    schema = json.loads(source)
    if schema is True:
        return "{}", []
    if schema is False:
        raise RequestError("the JSON schema allows nothing", at="grammar", fix="give a schema that allows something")
    notes: dict[str, None] = {}
    for part in _parts(schema):
        _leave_out_patterns(part, fault_of, notes)
        _leave_out_bounds(part, fault_of, notes)
    return (json.dumps(schema) if notes else source), list(notes)


def notes_of_warnings(warnings: Sequence[str]) -> list[str]:
    """llguidance's warnings as warnings of an answer."""
    notes: dict[str, None] = {}
    for warning in warnings:
        kind, _, detail = warning.partition(": ")
        if kind == "Unimplemented keys":
            notes |= dict.fromkeys(_ignored(key) for key in json.loads(detail))
        elif kind == "Unknown format":
            notes[_ignored(f"the format {detail!r}")] = None
        elif warning.startswith("oneOf"):
            notes["the JSON schema's oneOf is read as anyOf: an output may match several of its schemas"] = None
        elif "min/maxProperties" in warning:
            notes[_ignored("minProperties or maxProperties together with optional properties")] = None
        else:
            notes[f"the grammar is followed in part: {warning:.200}"] = None
    return list(notes)


def _ignored(what: str) -> str:
    return f"{what} in the JSON schema is ignored: the output may violate it"


def _parts(schema: object) -> Iterator[dict[str, Any]]:
    """The schema and all schemas in it. Data, such as a default, is not one."""
    pending = [schema]
    while pending:
        part = pending.pop()
        if isinstance(part, dict):
            yield part
            pending += [part[key] for key in _SINGLE if isinstance(part.get(key), dict)]
            pending += [child for key in _SEVERAL if isinstance(part.get(key), list) for child in part[key]]
            pending += [child for key in _NAMED if isinstance(part.get(key), dict) for child in part[key].values()]


def _leave_out_patterns(part: dict[str, Any], fault_of: Fault, notes: dict[str, None]) -> None:
    if isinstance(part.get("pattern"), str) and _lacks(fault_of({"type": "string", "pattern": part["pattern"]})):
        notes[_ignored(f"the pattern {part.pop('pattern')!r:.80}")] = None
    named = part.get("patternProperties")
    if isinstance(named, dict):
        for pattern in [candidate for candidate in named if _lacks(fault_of({"type": "string", "pattern": candidate}))]:
            del named[pattern]
            notes[_ignored(f"patternProperties of {pattern!r:.80}")] = None


def _leave_out_bounds(part: dict[str, Any], fault_of: Fault, notes: dict[str, None]) -> None:
    bounds = {key: part[key] for key in _BOUNDS if _is_number(part.get(key))}
    large = [key for key, value in bounds.items() if abs(value) >= _LARGE_BOUND]
    kinds = part.get("type")
    kind = "integer" if kinds == "integer" or (isinstance(kinds, list) and "number" not in kinds) else "number"
    if large and _lacks(fault_of({"type": kind, **bounds})):
        for key in large:
            notes[_ignored(f"{key} {part.pop(key)!r:.40}")] = None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _lacks(fault: str | None) -> bool:
    return fault is not None and _LACKS.search(fault) is not None
