"""Grammars as llguidance's Lark has them, put together rule by rule."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llmc.runtime.grammar.grammar import TOKENS_AS_THEY_COME, Mark

# The number of blanks that are accepted in place of one, since models omit them or write one more.
_LEAST_BLANKS = 2
_SPACE = re.compile(r"(\s+)")
# As models were taught to write JSON: a space after commas and colons, and no other white space.
_JSON_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class GrammarText:
    """The rules of a grammar. spell: a text as the tokenizer has it: pieces of text, and ids of special tokens."""

    def __init__(self, spell: Callable[[str], Sequence[Mark]]) -> None:
        self._spell = spell
        self._rules: list[str] = []
        self._names = 0
        self._terminals: dict[str, str] = {}
        self._schemas: dict[str, str] = {}

    def mark(self, text: str) -> str:
        """An expression for this text, with some freedom in its white space; empty if the text is."""
        parts = [part for mark in self._spell(text) for part in _words(mark)]
        return " ".join(map(self._expression, parts))

    def rule(self, body: str, options: str = "") -> str:
        """The name of a new rule."""
        name = self.new_name()
        self.define(name, body, options)
        return name

    def new_name(self) -> str:
        """A name for a rule that is defined later."""
        self._names += 1
        return f"r{self._names}"

    def define(self, name: str, body: str, options: str = "") -> None:
        """Define the rule of this name."""
        self._rules.append(f"{name}{options}: {body}")

    def terminal(self, body: str) -> str:
        """The name of a terminal, such as /[a-z]+/."""
        if body not in self._terminals:
            self._terminals[body] = f"T{len(self._terminals)}"
            self.define(self._terminals[body], body)
        return self._terminals[body]

    def choice(self, expressions: Sequence[str]) -> str:
        """The name of a rule that is one of the expressions."""
        return self.rule(" | ".join(expressions))

    def json(self, schema: Mapping[str, Any]) -> str:
        """The name of a rule for JSON that a schema allows."""
        body = json.dumps({**schema, "x-guidance": _JSON_SPACING})
        if body not in self._schemas:
            self._schemas[body] = self.rule(f"%json {body}")
        return self._schemas[body]

    def free_until(self, text: str) -> str:
        """An expression for any text with this text at its end."""
        mark = text.strip()
        blank = self.mark(text[text.index(mark) + len(mark) :])
        return f"{self._free_until(mark)} {blank}".strip()

    def _free_until(self, text: str) -> str:
        marks = list(self._spell(text))
        any_text = self.terminal("/(?s:.*)/")
        # llguidance ends a rule with a suffix where the text does, and a text before a special token.
        special = next((i for i, mark in enumerate(marks) if isinstance(mark, int)), None)
        if special is None:
            return self.rule(any_text, f"[suffix={_expression(text)}]")
        return self.rule(" ".join([any_text, *map(_expression, marks[special:])]))

    def _expression(self, part: Mark) -> str:
        if isinstance(part, str) and part.isspace():
            return self.terminal(rf"/[ \n]{{0,{max(_LEAST_BLANKS, len(part))}}}/")
        return _expression(part)

    def finished(self, start: str) -> str:
        """The whole grammar."""
        return "\n".join([TOKENS_AS_THEY_COME, f"start: {start}", *self._rules]) + "\n"


def _words(mark: Mark) -> list[Mark]:
    """A text's words, and each run of white space between them."""
    return [mark] if isinstance(mark, int) else [part for part in _SPACE.split(mark) if part]


def _expression(mark: Mark) -> str:
    return f"<[{mark}]>" if isinstance(mark, int) else json.dumps(mark, ensure_ascii=False)
