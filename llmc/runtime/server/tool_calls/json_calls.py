"""Calls that are JSON objects: {"name": …, "arguments": {…}}."""

import json
from dataclasses import dataclass

from llmc.runtime.server.tool_calls.calls import Calls
from llmc.runtime.server.tool_calls.grammar_text import GrammarText
from llmc.runtime.server.tool_calls.json_values import read_arguments, read_string, skip_value
from llmc.runtime.server.tool_calls.tools import Function, Tools
from llmc.runtime.text.incoming import Incoming, Wait

_NAMES = ("name", "tool_name")
_ARGUMENTS = ("arguments", "parameters")
_IDENTITIES = ("id",)


@dataclass
class _Call:
    """A partially read object. held: arguments that came before the name."""

    name: str | None = None
    identity: str | None = None
    held: str | None = None
    begun: bool = False


@dataclass(frozen=True)
class JsonCalls:
    """Calls that are JSON objects. name, arguments: the keys as the form writes them; every form's keys are read.
    before_name: what comes first."""

    name: str = "name"
    arguments: str = "arguments"
    before_name: str = ""
    marks: tuple[str, ...] = ()

    def read(self, source: Incoming, calls: Calls) -> Wait[bool]:
        """A call, if an object that is one comes next."""
        if not (yield from source.takes("{")):
            return False
        call = _Call()
        is_whole = yield from self._members(source, calls, call)
        if is_whole and not call.begun and call.name is not None:
            calls.begin(call.name, call.identity)
            calls.arguments(call.held or "{}")
            return True
        return call.begun

    def write(self, text: GrammarText, tools: Tools) -> str:
        """Write the grammar of one call of any of the functions."""
        return text.choice([self._of_function(text, function) for function in tools.values()])

    def example(self, name: str, key: str, value: str) -> str:
        """An example call; see Notation.example."""
        return f"{self._begun(name)}{json.dumps({key: value})}}}"

    def _begun(self, name: str) -> str:
        return f'{{{self.before_name}"{self.name}": "{name}", "{self.arguments}": '

    def _of_function(self, text: GrammarText, function: Function) -> str:
        return f"{text.mark(self._begun(function.name))} {text.json(function.arguments_schema)} {text.mark('}')}"

    def _members(self, source: Incoming, calls: Calls, call: _Call) -> Wait[bool]:
        """Read to the object's end; whether it was reached, and names no unknown function."""
        while True:
            yield from source.skip_blank()
            if (yield from source.takes("}")):
                return True
            if (yield from source.takes(",")):
                continue
            if not (yield from source.starts('"')):
                return False
            key = yield from read_string(source)
            yield from source.skip_blank()
            if not (yield from source.takes(":")):
                return False
            yield from source.skip_blank()
            if not (yield from self._value(key, source, calls, call)):
                return False

    def _value(self, key: str, source: Incoming, calls: Calls, call: _Call) -> Wait[bool]:
        first = yield from source.next_character()
        if key in (*_NAMES, "function") and first == '"' and call.name is None:
            name = yield from read_string(source)
            if name not in calls.tools:
                return False
            call.name = name
        elif key in _IDENTITIES and first == '"':
            call.identity = yield from read_string(source)
        elif key == "function" and first == "{":
            source.at += 1
            return (yield from self._members(source, calls, call))
        elif key in _ARGUMENTS and not call.begun:
            return (yield from self._arguments(source, calls, call))
        else:
            yield from skip_value(source)
        return True

    def _arguments(self, source: Incoming, calls: Calls, call: _Call) -> Wait[bool]:
        if call.name is None:
            parts: list[str] = []
            are_arguments = yield from read_arguments(source, lambda: None, parts.append)
            call.held = "".join(parts)
            return are_arguments
        name = call.name

        def begin() -> None:
            source.returns, call.begun = False, True
            calls.begin(name, call.identity)

        return (yield from read_arguments(source, begin, calls.arguments))
