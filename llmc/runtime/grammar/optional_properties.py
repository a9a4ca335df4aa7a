"""Objects of a JSON schema with more optional properties than a grammar of them can have."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Any

from llmc.errors import RequestError
from llmc.runtime.grammar.limits import beyond, parser_limits

if TYPE_CHECKING:
    from llguidance import LLTokenizer

# A run of fewer is never beyond the limit, since each takes four of 2,000 items; one of more always is.
_TRIED_FROM, _TRIED_TO = 400, 600


def check_optional_properties(schema: object, tokenizer: LLTokenizer) -> None:
    """Raise RequestError for an object that could not be begun.

    Any of the optional properties up to the next required one may come first, and the parser keeps all of them in one
    row. An object deep in a schema is found here, which trying the grammar's beginning would not reach.
    """
    for properties, required, is_closed in _objects(schema):
        runs = [len(list(run)) for is_required, run in groupby(properties, required.__contains__) if not is_required]
        longest = max(runs, default=0)
        needs = None if longest < _TRIED_FROM else _beginning_needs(min(longest, _TRIED_TO), is_closed, tokenizer)
        if needs is not None:
            raise RequestError(
                f"an object of the schema has {longest:,} optional properties in a row: {needs}",
                at="grammar",
                fix="require some of the properties, or split the object",
            )


def _beginning_needs(optional: int, is_closed: bool, tokenizer: LLTokenizer) -> str | None:
    """Return the limit that the beginning of such an object exceeds; None if it exceeds none."""
    from llguidance import LLMatcher

    schema: dict[str, Any] = {"type": "object", "properties": {str(number): {} for number in range(optional)}}
    if is_closed:
        schema["additionalProperties"] = False
    text = LLMatcher.grammar_from_json_schema(json.dumps(schema))
    matcher = LLMatcher(tokenizer, str(text), log_level=0, limits=parser_limits())
    begins = matcher.consume_tokens(tokenizer.tokenize_bytes(b"{"))
    return None if begins else beyond(matcher.get_error())


def _objects(schema: object) -> Iterator[tuple[list[str], frozenset[str], bool]]:
    """Yield for each object its property names, the required ones, and whether further ones are forbidden."""
    pending = [schema]
    while pending:
        part = pending.pop()
        if isinstance(part, list):
            pending += part
        elif isinstance(part, dict):
            pending += part.values()
            properties, required = part.get("properties"), part.get("required")
            if isinstance(properties, dict):
                names = required if isinstance(required, list) else []
                is_closed = part.get("additionalProperties") is False
                yield list(properties), frozenset(name for name in names if isinstance(name, str)), is_closed
