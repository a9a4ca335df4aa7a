"""Calls with a pair of tags around each argument, as plain text: <parameter=city>Paris</parameter>."""

import json
from dataclasses import dataclass

from llmc.runtime.server.tool_calls.calls import Calls
from llmc.runtime.server.tool_calls.grammar_text import GrammarText
from llmc.runtime.server.tool_calls.json_values import Say, escaped
from llmc.runtime.server.tool_calls.tools import Function, Tools
from llmc.runtime.server.tool_calls.typed_text import is_plain, typed_value
from llmc.runtime.text.incoming import Incoming, Wait


@dataclass(frozen=True)
class TaggedCalls:
    """The texts of a call in order, with the line breaks that the form writes; reading needs none of them.

    name_ends: marks that end a name. text_key_closing: replaces key_closing before a text. value_opening: follows
    key_closing. ends: marks after a value that show that it has ended, because the same mark within it is text. padded:
    a line break after key_closing and one before value_closing are not part of the value.
    """

    opening: str
    name_closing: str
    key_opening: str
    key_closing: str
    value_closing: str
    closing: str
    name_ends: tuple[str, ...]
    ends: tuple[str, ...]
    text_key_closing: str | None = None
    value_opening: str = ""
    padded: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        """Marks that may be special tokens."""
        keys = (self.key_opening, self.key_closing, self.text_key_closing, self.value_opening, self.value_closing)
        return tuple(filter(None, (self.opening, *keys, self.closing)))

    def read(self, source: Incoming, calls: Calls) -> Wait[bool]:
        """A call, if the tag with a known name comes next."""
        if not (yield from source.takes(self.opening)):
            return False
        text, end = yield from source.word(self.name_ends)
        function = calls.tools.get(text.strip())
        if function is None or (end is None and (source.cut or not source.ended)):
            return False
        if end == self.name_closing.strip():
            source.at += len(end)
        source.returns = False
        calls.begin(function.name)
        calls.arguments("{")
        between = ""
        while (yield from self._key_opens(source)):
            key, closing = yield from source.word(tuple(c.strip() for c in self._key_closings))
            if closing is None:
                break
            source.at += len(closing)
            if not (yield from self._value_opens(source)):
                break
            calls.arguments(f"{between}{json.dumps(key, ensure_ascii=False)}: ")
            is_text = is_plain(function, key) or closing == self.text_key_closing
            yield from self._text(source, calls) if is_text else self._typed(source, calls, function, key)
            between = ", "
        ends = (self.closing.strip() or self.ends[-1], self.key_opening, self.value_opening)
        if (yield from self._closes(source)) or not (source.cut and source.ends_in(ends)):
            calls.arguments("}")
        return True

    def write(self, text: GrammarText, tools: Tools) -> str:
        """Write the grammar of one call of any of the functions."""
        return text.choice([self._of_function(text, function) for function in tools.values()])

    def example(self, name: str, key: str, value: str) -> str:
        """An example call; see Notation.example."""
        key_closing = self.text_key_closing or self.key_closing
        argument = f"{self.key_opening}{key}{key_closing}{self.value_opening}{value}{self.value_closing}"
        return f"{self.opening}{name}{self.name_closing}{argument}{self.closing}"

    @property
    def _key_closings(self) -> tuple[str, ...]:
        return (self.key_closing,) if self.text_key_closing is None else (self.key_closing, self.text_key_closing)

    def _key_opens(self, source: Incoming) -> Wait[bool]:
        yield from source.skip_blank()
        return (yield from source.takes(self.key_opening))

    def _closes(self, source: Incoming) -> Wait[bool]:
        if self.closing:
            return (yield from source.takes(self.closing.strip()))
        return (yield from source.which(self.ends)) is not None

    def _value_opens(self, source: Incoming) -> Wait[bool]:
        """Skip the optional mark before a value. Returns whether a value may follow."""
        if not self.value_opening:
            return True
        yield from source.skip_blank()
        return (yield from source.takes(self.value_opening)) or not source.ends_in((self.value_opening,))

    def _text(self, source: Incoming, calls: Calls) -> Wait[None]:
        """Pass on a text as it comes."""
        calls.arguments('"')
        is_whole = yield from self._value(source, lambda text: calls.arguments(escaped(text)))
        calls.arguments('"' if is_whole or not source.cut else "")

    def _typed(self, source: Incoming, calls: Calls, function: Function, key: str) -> Wait[None]:
        """Pass on a value when it is whole."""
        parts: list[str] = []
        if (yield from self._value(source, parts.append)) or not source.cut:
            calls.arguments(json.dumps(typed_value("".join(parts), function, key), ensure_ascii=False))

    def _value(self, source: Incoming, say: Say) -> Wait[bool]:
        """Emit a value's text; return whether its end was reached."""
        if self.padded:
            yield from source.takes("\n")
        closing, held = self.value_closing.strip(), ""
        while True:
            text, stop = yield from source.piece((closing,), drops=True)
            if not text and stop is None:
                return False
            text = held + text
            if stop is not None:
                if (yield from self._is_end(source, closing)):
                    say(text.removesuffix("\n") if self.padded else text)
                    return True
                text += closing
            held = "\n" if self.padded and text.endswith("\n") else ""
            say(text.removesuffix(held))

    def _is_end(self, source: Incoming, closing: str) -> Wait[bool]:
        """Read the next closing tag, and return whether it ends the value."""
        source.returns = True
        after = source.at + len(closing)
        source.at = after
        yield from source.skip_blank()
        is_end = (yield from source.which(self.ends)) is not None or source.ends_in(self.ends)
        source.at, source.returns = after, False
        return is_end

    def _of_function(self, text: GrammarText, function: Function) -> str:
        begun = text.mark(self.opening + function.name + self.name_closing)
        arguments = [self._written(text, function, name) for name in function.properties]
        if not function.names_arguments:
            arguments = [self._any(text)]
        return " ".join(filter(None, (begun, *arguments, text.mark(self.closing))))

    def _written(self, text: GrammarText, function: Function, name: str) -> str:
        types = function.types(name)
        is_text = not types or "string" in types
        key_closing = self.text_key_closing if is_text and self.text_key_closing else self.key_closing
        key = text.mark(self.key_opening + name + key_closing + self.value_opening)
        written = (value if isinstance(value, str) else json.dumps(value) for value in function.values(name))
        values = [text.mark(literal + self.value_closing) for literal in written]
        if values:
            value = text.choice(values)
        elif is_text:
            value = text.free_until(self.value_closing)
        else:
            value = f"{text.json(function.argument_schema(name))} {text.mark(self.value_closing)}"
        return text.rule(f"{key} {value}") + ("" if name in function.required else "?")

    def _any(self, text: GrammarText) -> str:
        """Arguments of a function that names none."""
        key = text.rule(text.terminal(r"/[\w.-]+/"))
        closing = text.mark((self.text_key_closing or self.key_closing) + self.value_opening)
        value = text.free_until(self.value_closing)
        return text.rule(f"{text.mark(self.key_opening)} {key} {closing} {value}") + "*"
