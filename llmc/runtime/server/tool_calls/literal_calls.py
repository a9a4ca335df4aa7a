"""Calls with keyword arguments: weather(city="Paris") of Python, call:weather{city:<|"|>Paris<|"|>} of Gemma."""

import json
import re
from dataclasses import dataclass

from llmc.runtime.server.tool_calls.calls import Calls
from llmc.runtime.server.tool_calls.grammar_text import GrammarText
from llmc.runtime.server.tool_calls.json_values import escaped
from llmc.runtime.server.tool_calls.literal_grammar import LiteralGrammar
from llmc.runtime.server.tool_calls.literals import Dialect, NotLiteral, pass_text, read_value
from llmc.runtime.server.tool_calls.tools import Function, Tools
from llmc.runtime.text.incoming import Incoming, Wait

_NAME = re.compile(r"[\w.-]*", re.ASCII)


@dataclass(frozen=True)
class LiteralCalls:
    """Calls with arguments as literals. opening, closing: The marks around the arguments. assign: comes between a key
    and its value.

    before: comes before the name. between: comes between arguments, as the form writes them.
    """

    dialect: Dialect
    opening: str
    closing: str
    assign: str
    between: str
    before: str = ""

    @property
    def marks(self) -> tuple[str, ...]:
        """Marks that may be special tokens."""
        return self.dialect.quotes[:1]

    def read(self, source: Incoming, calls: Calls) -> Wait[bool]:
        """A call, if a known name with its bracket comes next."""
        if not (yield from source.takes(self.before)):
            return False
        name = yield from source.take_while(_NAME)
        function = calls.tools.get(name)
        if function is None or not (yield from source.takes(self.opening)):
            return False
        source.returns = False
        calls.begin(name)
        calls.arguments("{")
        try:
            is_whole = yield from self._arguments(source, calls, function)
        except NotLiteral:
            return True
        if is_whole or not source.cut:
            calls.arguments("}")
        return True

    def write(self, text: GrammarText, tools: Tools) -> str:
        """Write the grammar of one call of any of the functions."""
        values = LiteralGrammar(text, self.dialect)
        return text.choice([self._of_function(text, values, function) for function in tools.values()])

    def example(self, name: str, key: str, value: str) -> str:
        """An example call; see Notation.example."""
        quote = self.dialect.quotes[0]
        argument = f"{key}{self.assign}{quote}{value}{quote}"
        return f"{self.before}{name}{self.opening}{argument}{self.closing}"

    def _of_function(self, text: GrammarText, values: LiteralGrammar, function: Function) -> str:
        members = [
            (f"{text.mark(name + self.assign)} {values.rule(schema, function.parameters)}", name in function.required)
            for name, schema in function.properties.items()
        ]
        begun = text.mark(self.before + function.name + self.opening)
        return " ".join(filter(None, (begun, values.sequence(members, self.between), text.mark(self.closing))))

    def _arguments(self, source: Incoming, calls: Calls, function: Function) -> Wait[bool]:
        """Pass on the arguments; whether the closing bracket came."""
        between, names = "", iter(function.properties)
        while (yield from self._another(source)):
            if (yield from source.takes(self.closing)):
                return True
            key = yield from self._key(source)
            key = next(names, None) if key is None else key
            if key is None:
                # Some models write None for an absent value.
                if (yield from read_value(source, self.dialect)) is not None:
                    raise NotLiteral
                continue
            yield from self._value(source, calls, f"{between}{json.dumps(key, ensure_ascii=False)}: ")
            between = ", "
        return False

    def _another(self, source: Incoming) -> Wait[bool]:
        """Whether anything follows a comma, if there is one."""
        yield from source.skip_blank()
        yield from source.takes(",")
        yield from source.skip_blank()
        return (yield from source.more())

    def _key(self, source: Incoming) -> Wait[str | None]:
        """The key of a keyword argument; None if it has none, which the place in the order tells."""
        quote = yield from source.which(self.dialect.quotes)
        if quote is not None and not self.dialect.escapes:
            key = str((yield from read_value(source, self.dialect)))
            yield from source.skip_blank()
            return key if (yield from source.takes(self.assign)) else None
        source.returns, start = True, source.at
        key = yield from source.take_while(_NAME)
        yield from source.skip_blank()
        has_key = bool(key) and (yield from source.takes(self.assign))
        source.at = source.at if has_key else start
        source.returns = False
        return key if has_key else None

    def _value(self, source: Incoming, calls: Calls, begun: str) -> Wait[None]:
        """Pass on a value; a text as it comes, any other when it is whole."""
        yield from source.skip_blank()
        quote = yield from source.which(self.dialect.quotes)
        if quote is None:
            value = yield from read_value(source, self.dialect)
            calls.arguments(begun + json.dumps(value, ensure_ascii=False))
            return
        calls.arguments(f'{begun}"')
        is_whole = yield from pass_text(source, quote, self.dialect, lambda text: calls.arguments(escaped(text)))
        calls.arguments('"' if is_whole or not source.cut else "")
