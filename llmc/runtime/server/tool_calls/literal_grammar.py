"""Values of a JSON schema as a dialect writes them, as a grammar."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from llmc.runtime.server.tool_calls.grammar_text import GrammarText
from llmc.runtime.server.tool_calls.literals import Dialect
from llmc.runtime.server.tool_calls.tools import Schema, resolved, types_of

_SCALARS = {
    "integer": r"/-?(0|[1-9][0-9]{0,17})/",
    "number": r"/-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?/",
}
# In double quotes or single ones.
_STRING = r"""/"([^"\\\x00-\x1f]|\\["\\nrt])*"|'([^'\\\x00-\x1f]|\\['\\nrt])*'/"""
_ALL = ("string", "number", "boolean", "null", "array", "object")
_DEEPEST = 64


class LiteralGrammar:
    """Adds the rules to a grammar. Constraints of a schema other than types, values, items and properties are not
    enforced."""

    def __init__(self, text: GrammarText, dialect: Dialect) -> None:
        self._text = text
        self._dialect = dialect
        self._words = ("True", "False", "None") if dialect.escapes else ("true", "false", "null")
        self._known: dict[tuple[int, bool], str] = {}

    def rule(self, schema: Any, root: Schema, depth: int = 0) -> str:
        """The name of a rule for the schema's values. root: the schema that its references are in."""
        target = resolved(schema, root)
        key = id(target), depth >= _DEEPEST
        if key not in self._known:
            # Known before it is there, since a schema may be a part of itself.
            name = self._known[key] = self._text.new_name()
            self._text.define(name, " | ".join(self._alternatives(target, root, depth)))
        return self._known[key]

    def sequence(self, members: Sequence[tuple[str, bool]], between: str) -> str:
        """An expression for members in this order, each with whether it has to be there; empty if there are none."""
        follows, begins = "", list[str]()
        for expression, is_required in reversed(members):
            after = f"{expression} {follows}".strip()
            begins = [after] if is_required else [after, *begins]
            more = f"{self._text.mark(between)} {after}"
            if not is_required:
                more = f"{more} | {follows}" if follows else f"({more})?"
            follows = self._text.rule(more)
        if not begins:
            return ""
        is_empty = not any(is_required for _, is_required in members)
        return f"({' | '.join(begins)})" + ("?" if is_empty else "")

    def _alternatives(self, schema: Schema, root: Schema, depth: int) -> list[str]:
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list) and values:
            return [self._text.mark(self.written(value)) for value in values]
        parts = next((schema[key] for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list)), None)
        if parts and depth < _DEEPEST:
            return [self.rule(part, root, depth + 1) for part in parts]
        kinds = types_of(schema, root) or _ALL
        if depth >= _DEEPEST:
            kinds = tuple(kind for kind in kinds if kind not in ("array", "object")) or ("null",)
        return [self._of_type(kind, schema, root, depth) for kind in kinds]

    def _of_type(self, kind: str, schema: Schema, root: Schema, depth: int) -> str:
        true, false, null = self._words
        if kind == "boolean":
            return self._text.choice([json.dumps(true), json.dumps(false)])
        if kind in _SCALARS:
            return self._text.terminal(_SCALARS[kind])
        if kind == "string":
            return self._string()
        if kind == "array":
            item = self.rule(schema.get("items"), root, depth + 1)
            return self._text.rule(f'"[" ({item} ("{self._comma}" {item})*)? "]"')
        return self._object(schema, root, depth) if kind == "object" else self._text.rule(json.dumps(null))

    def _object(self, schema: Schema, root: Schema, depth: int) -> str:
        properties, required = schema.get("properties"), schema.get("required")
        if not isinstance(properties, Mapping) or not properties:
            return self._text.rule('"{" "}"')
        members = [
            (
                f"{self._text.mark(self._key(name))} {self.rule(property_schema, root, depth + 1)}",
                isinstance(required, list) and name in required,
            )
            for name, property_schema in properties.items()
        ]
        return self._text.rule(f'"{{" {self.sequence(members, self._comma)} "}}"')

    def _string(self) -> str:
        quote = self._dialect.quotes[0]
        if self._dialect.escapes:
            return self._text.terminal(_STRING)
        return self._text.rule(f"{self._text.mark(quote)} {self._text.free_until(quote)}")

    @property
    def _comma(self) -> str:
        return ", " if self._dialect.escapes else ","

    def _key(self, name: str) -> str:
        return f"{json.dumps(name)}: " if self._dialect.escapes else f"{name}:"

    def written(self, value: Any) -> str:
        """A value as the dialect writes it."""
        quote = self._dialect.quotes[0]
        true, false, null = self._words
        if value is None or isinstance(value, bool):
            return null if value is None else true if value else false
        if isinstance(value, str) and not self._dialect.escapes:
            return f"{quote}{value}{quote}"
        if isinstance(value, list):
            return f"[{self._comma.join(map(self.written, value))}]"
        if isinstance(value, Mapping):
            return "{" + self._comma.join(self._key(k) + self.written(v) for k, v in value.items()) + "}"
        return json.dumps(value, ensure_ascii=False)
