"""A form of tool calls: how calls are found in a text, how they are parsed, and how a grammar writes them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from llmc.runtime.server.tool_calls.calls import Calls
from llmc.runtime.server.tool_calls.grammar_text import GrammarText
from llmc.runtime.server.tool_calls.tools import Tools
from llmc.runtime.text.incoming import Incoming, Wait


class Notation(Protocol):
    """The notation of one call within a section."""

    @property
    def marks(self) -> tuple[str, ...]:
        """The texts of this notation that may be special tokens of a model."""

    def read(self, source: Incoming, calls: Calls) -> Wait[bool]:
        """Read a call and emit its events. False, with nothing told, if none comes next."""

    def write(self, text: GrammarText, tools: Tools) -> str:
        """An expression for one call of any of the functions."""

    def example(self, name: str, key: str, value: str) -> str:
        """A call with one argument, which is a text."""


@dataclass(frozen=True)
class Section:
    """The section around calls. opening: comes before them. closing: comes after them; None if nothing does.

    at_start: counts only at the beginning of the text. is_call: the opening is the call's own beginning.
    """

    opening: str
    closing: str | None = None
    at_start: bool = False
    is_call: bool = False


@dataclass(frozen=True)
class Layout:
    """Texts that a grammar writes: before all calls, around each call, between two, and after all of them."""

    before: str = ""
    begin: str = ""
    end: str = ""
    between: str = ""
    after: str = ""


@dataclass(frozen=True)
class ToolForm:
    """A form of tool calls.

    name: as --tool-call-parser has it, with vLLM's other names for it in `aliases`. families: whose form it is.
    taught: expressions, each of which a chat template that teaches the form contains. call_marks: enclose each call
    within a section. notations: grammars write the first; all are read. ends_thoughts: models begin calls without
    closing their thoughts. short_ids: the template takes no ids of calls but those of nine letters and digits.
    channels: the whole output is in harmony's channels, calls among them.
    """

    name: str
    families: str
    taught: tuple[str, ...]
    sections: tuple[Section, ...]
    notations: tuple[Notation, ...]
    layout: Layout
    aliases: tuple[str, ...] = ()
    call_marks: tuple[str, str] = ("", "")
    ends_thoughts: bool = False
    short_ids: bool = False
    channels: bool = False

    @property
    def example(self) -> str:
        """An example call, for prompts that explain the form."""
        layout = self.layout
        call = self.notations[0].example("NAME", "ARGUMENT", "VALUE")
        return f"{layout.before}{layout.begin}{call}{layout.end}{layout.after}"

    @property
    def marks(self) -> frozenset[str]:
        """All texts in the form that may be special tokens."""
        around = [mark for section in self.sections for mark in (section.opening, section.closing)]
        inside = [mark for notation in self.notations for mark in notation.marks]
        marks: Sequence[str | None] = (*around, *inside, *self.call_marks)
        return frozenset(mark.strip() for mark in marks if mark and mark.strip())
