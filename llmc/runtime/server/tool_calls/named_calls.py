"""Calls that are a name, a mark and the arguments in JSON: get_weather[ARGS]{…}."""

import json
import re
from dataclasses import dataclass

from llmc.runtime.server.tool_calls.calls import Calls
from llmc.runtime.server.tool_calls.grammar_text import GrammarText
from llmc.runtime.server.tool_calls.json_values import read_arguments
from llmc.runtime.server.tool_calls.tools import Function, Tools
from llmc.runtime.text.incoming import Incoming, Wait

_NAME = re.compile(r"(?P<name>[\w.-]+)", re.ASCII)


@dataclass(frozen=True)
class NamedCalls:
    """How the form writes a call: before the name, between it and the arguments, and after these.

    name: a pattern for the name, with a group `name`, and a group `identity` if models give calls ids. numbered: the
    separator between the name and a number. identity_mark: the separator between the name and an id. also: marks
    accepted in place of `between`. ends: marks that also end a name, and belong to the arguments. leads, trails: marks
    that are skipped before the name and after the arguments.
    """

    between: str
    before: str = ""
    after: str = ""
    name: re.Pattern[str] = _NAME
    numbered: str = ""
    identity_mark: str | None = None
    also: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    leads: tuple[str, ...] = ()
    trails: tuple[str, ...] = ()

    @property
    def marks(self) -> tuple[str, ...]:
        """Marks that may be special tokens."""
        return tuple(
            filter(None, (self.before, self.between, self.after, self.identity_mark, *self.leads, *self.trails))
        )

    def read(self, source: Incoming, calls: Calls) -> Wait[bool]:
        """A call, if a known name with its mark comes next."""
        yield from _skip(source, self.leads)
        stops = tuple(filter(None, (self.between.strip(), self.identity_mark, *self.also, *self.ends)))
        text, stop = yield from source.word(stops)
        match = self.name.fullmatch(text.strip())
        if stop is None or match is None or match["name"] not in calls.tools:
            return False
        identity = match.groupdict().get("identity")
        if stop == self.identity_mark:
            source.at += len(stop)
            identity, stop = yield from source.word(stops)
            if stop is None:
                return False
        if stop not in self.ends:
            source.at += len(stop)
        yield from source.skip_blank()
        name = match["name"]

        def begin() -> None:
            source.returns = False
            calls.begin(name, identity)

        are_arguments = yield from read_arguments(source, begin, calls.arguments, empty=True)
        if are_arguments:
            yield from _skip(source, self.trails)
        return are_arguments

    def write(self, text: GrammarText, tools: Tools) -> str:
        """Write the grammar of one call of any of the functions."""
        return text.choice([self._of_function(text, function) for function in tools.values()])

    def example(self, name: str, key: str, value: str) -> str:
        """An example call; see Notation.example."""
        number = f"{self.numbered}0" if self.numbered else ""
        return f"{self.before}{name}{number}{self.between}{json.dumps({key: value})}{self.after}"

    def _of_function(self, text: GrammarText, function: Function) -> str:
        number = text.terminal("/[0-9]+/") if self.numbered else ""
        name = (text.mark(self.before + function.name + self.numbered), number, text.mark(self.between))
        return " ".join(filter(None, (*name, text.json(function.arguments_schema), text.mark(self.after))))


def _skip(source: Incoming, marks: tuple[str, ...]) -> Wait[None]:
    """Read over blanks and the marks that come next."""
    yield from source.skip_blank()
    for mark in marks:
        if (yield from source.takes(mark)):
            yield from source.skip_blank()
