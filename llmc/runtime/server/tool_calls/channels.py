"""Outputs in harmony's channels: <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final…"""

import re
from collections.abc import Generator

from llmc.runtime.server.output_events import Event, Text, Thought
from llmc.runtime.server.output_reader import OutputReader
from llmc.runtime.server.tool_calls.calls import Calls
from llmc.runtime.server.tool_calls.json_values import read_arguments
from llmc.runtime.server.tool_calls.tools import Tools
from llmc.runtime.text.incoming import Wait

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
FINAL = "<|channel|>final<|message|>"
_HEADERS = (START, CHANNEL, MESSAGE, " to=", "to=")
_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.-]+)")
_BETWEEN = "\n\n"


class ChannelReader(OutputReader):
    """Messages in the channel `analysis` are thoughts; a message to a known function is a call; all others are text.

    prompt: the text that the output continues; it may end within a message.
    """

    def __init__(self, tools: Tools, prompt: str = "") -> None:
        super().__init__()
        self._calls = Calls(tools, self._say)
        self._said: set[type[Event]] = set()
        _, start, begun = prompt.rpartition(START)
        if start and MESSAGE in begun:
            self.feed(start + begun)
            self._said.clear()

    def _read(self) -> Generator[None, None, None]:
        while (yield from self._source.more()):
            is_headed = (yield from self._source.which(_HEADERS)) is not None
            header = (yield from self._header()) if is_headed else ""
            if header is not None:
                yield from self._message(header)
                end = yield from self._source.which(_ENDS)
                self._source.at += len(end or "")

    def _header(self) -> Wait[str | None]:
        """The header of a message; None if no message follows."""
        header, mark = yield from self._source.word((MESSAGE,))
        if mark is not None:
            self._source.at += len(mark)
            return header
        if not self._source.is_over:
            self._say(Text(header))
        return None

    def _message(self, header: str) -> Wait[None]:
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        stops = (*_ENDS, START)
        if recipient is not None and recipient[1] in self._calls.tools:
            yield from self._call(recipient[1], stops)
            return
        kind = Thought if channel is not None and channel[1] == "analysis" else Text
        begun = header + MESSAGE if recipient is not None and kind is Text else ""
        between = _BETWEEN if kind in self._said else ""

        def say(text: str) -> None:
            nonlocal begun, between
            self._say(kind(between + begun + text))
            begun = between = ""

        yield from self._source.until(stops, say)

    def _call(self, name: str, stops: tuple[str, ...]) -> Wait[None]:
        def begin() -> None:
            self._calls.begin(name)

        yield from self._source.skip_blank()
        if not (yield from read_arguments(self._source, begin, self._calls.arguments, empty=True)):
            begin()
            yield from self._source.until(stops, self._calls.arguments)
        yield from self._source.until(stops, lambda text: None)

    def _say(self, event: Event) -> None:
        self._said.add(type(event))
        super()._say(event)
