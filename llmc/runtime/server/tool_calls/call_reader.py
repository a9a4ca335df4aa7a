"""Splits an output that comes piece by piece into text and calls, in any form."""

from collections.abc import Generator

from llmc.runtime.server.output_events import CallBegun, Event, Text
from llmc.runtime.server.output_reader import OutputReader
from llmc.runtime.server.tool_calls.calls import Calls
from llmc.runtime.server.tool_calls.form import Section, ToolForm
from llmc.runtime.server.tool_calls.tools import Tools
from llmc.runtime.text.incoming import Wait

_SEPARATORS = (",", ";", "[")


class CallReader(OutputReader):
    """Calls of known functions, and everything else as text. Only white space next to a call is neither."""

    def __init__(self, form: ToolForm, tools: Tools) -> None:
        super().__init__()
        self._form = form
        self._calls = Calls(tools, self._say)
        self._anywhere = tuple(section.opening for section in form.sections if not section.at_start)
        self._blank = ""
        self._in_text = self._has_called = False

    def _read(self) -> Generator[None, None, None]:
        while (yield from self._source.more()):
            if self._in_text:
                text, opening = yield from self._source.piece(self._anywhere)
                self._say_text(text)
            else:
                self._blank += yield from self._source.skip_blank()
                opening = yield from self._source.which([section.opening for section in self._form.sections])
                self._in_text = opening is None and (yield from self._source.more())
            if opening is not None:
                yield from self._section(next(s for s in self._form.sections if s.opening == opening))
        if not self._has_called:
            self._say_text("")

    def _section(self, section: Section) -> Wait[None]:
        """Read the calls after an opening. An opening without calls is text."""
        source, start, count = self._source, self._source.at, 0
        source.returns = True
        if not section.is_call:
            source.at += len(section.opening)
        last = source.at
        while (yield from self._call()):
            count += 1
            source.returns, last = True, source.at
        source.at = last
        if count == 0:
            source.at = start + len(section.opening)
            self._say_text(section.opening)
        elif not (yield from self._closes(section)):
            source.at = last
        source.returns = False

    def _call(self) -> Wait[bool]:
        """Read the next call of a section."""
        source, (opening, closing) = self._source, self._form.call_marks
        yield from source.skip_blank()
        while (separator := (yield from source.which(_SEPARATORS))) is not None:
            source.at += len(separator)
            yield from source.skip_blank()
        if opening and (yield from source.takes(opening)):
            yield from source.skip_blank()
        start = source.at
        for notation in self._form.notations:
            if (yield from notation.read(source, self._calls)):
                yield from source.skip_blank()
                yield from source.takes(closing)
                return True
            source.at = start
        return False

    def _closes(self, section: Section) -> Wait[bool]:
        """Read what closes a list, and the section."""
        yield from self._source.skip_blank()
        closes_list = yield from self._source.takes("]")
        yield from self._source.skip_blank()
        closes = section.closing is not None and (yield from self._source.takes(section.closing))
        return closes_list or closes

    def _say(self, event: Event) -> None:
        if isinstance(event, CallBegun):
            self._blank, self._in_text, self._has_called = "", False, True
        super()._say(event)

    def _say_text(self, text: str) -> None:
        shown, self._blank = self._blank + text, ""
        if shown:
            self._in_text = self._in_text or bool(text)
            super()._say(Text(shown))
