"""JSON schemas within grammars in Lark's notation: `%json {…}`, as the grammars of tool calls have them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

# Texts, expressions and comments have no schemas in them.
_SCHEMA = re.compile(
    r"""
    "(?:\\.|[^"\\\n])*" | /(?:\\.|[^/\\\n])+/ | (?://|\#)[^\n]* | %json\s*(?P<schema>\{)
    """,
    re.VERBOSE,
)
_OPTIONS = "x-guidance"
# Takes a schema as text, and gives the one that is served.
Serve = Callable[[str], str]


def with_served_schemas(grammar: str, serve: Serve) -> str:
    """The grammar with each schema in its served form, in which keywords unknown to llguidance are not errors."""
    pieces: list[str] = []
    at = 0
    decoder = json.JSONDecoder()
    while (match := _SCHEMA.search(grammar, at)) is not None:
        if match["schema"] is None:
            pieces.append(grammar[at : match.end()])
            at = match.end()
            continue
        begin = match.start("schema")
        try:
            schema, end = decoder.raw_decode(grammar, begin)
        except ValueError:
            break  # llguidance reports the error in it.
        pieces += [grammar[at:begin], serve(json.dumps(_leniently(schema)))]
        at = end
    return "".join([*pieces, grammar[at:]])


def _leniently(schema: Mapping[str, Any]) -> dict[str, Any]:
    options = schema.get(_OPTIONS)
    return {**schema, _OPTIONS: {"lenient": True, **(options if isinstance(options, Mapping) else {})}}
