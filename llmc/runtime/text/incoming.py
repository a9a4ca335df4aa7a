"""Text that comes piece by piece, for readers written as if it were whole.

A reader is a generator that yields where it needs more text. It decides nothing on text that a later piece could
change, so what it finds does not depend on how the text was cut.
"""

import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from llmc.runtime.text.output_text import held_back

T = TypeVar("T")
Wait = Generator[None, None, T]
_MOST_IN_WORD = 256
_BLANK = re.compile(r"\s*")


class Incoming:
    """The text that was received, and a place in it.

    ended: no more comes; cut: because a limit broke the output off. returns: a reader may go back to an earlier place,
    so that text which was read has to stay.
    """

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False
        self.cut = False
        self.returns = False

    def add(self, piece: str) -> None:
        """Take the next piece."""
        if not self.returns:
            self.text, self.at = self.text[self.at :], 0
        self.text += piece

    def end(self, cut: bool) -> None:
        """Note that no piece follows."""
        self.ended, self.cut = True, cut

    @property
    def is_over(self) -> bool:
        """Whether the text has ended, and all of it was read."""
        return self.ended and self.at == len(self.text)

    def ends_in(self, marks: Sequence[str]) -> bool:
        """Whether the text has ended, and with the beginning of a mark, or nothing, behind this place."""
        rest = self.text[self.at :]
        return self.ended and any(mark.startswith(rest) for mark in marks)

    def more(self) -> Wait[bool]:
        """Whether there is another character."""
        while self.at == len(self.text):
            if self.ended:
                return False
            yield
        return True

    def next_character(self) -> Wait[str]:
        """The next character, which stays; empty at the end."""
        return self.text[self.at] if (yield from self.more()) else ""

    def starts(self, mark: str) -> Wait[bool]:
        """Whether the mark comes next."""
        while True:
            seen = self.text[self.at : self.at + len(mark)]
            if seen == mark:
                return True
            if self.ended or not mark.startswith(seen):
                return False
            yield

    def which(self, marks: Sequence[str]) -> Wait[str | None]:
        """The first of the marks that comes next."""
        for mark in marks:
            if (yield from self.starts(mark)):
                return mark
        return None

    def takes(self, mark: str) -> Wait[bool]:
        """Whether the mark comes next; if so it is read."""
        starts = yield from self.starts(mark)
        if starts:
            self.at += len(mark)
        return starts

    def take_while(self, pattern: re.Pattern[str]) -> Wait[str]:
        """Read the longest run of a pattern that takes any number of characters, each on its own."""
        parts: list[str] = []
        while True:
            match = pattern.match(self.text, self.at)
            parts.append(self._read_to(match.end() if match else self.at))
            if self.ended or self.at < len(self.text):
                return "".join(parts)
            yield

    def skip_blank(self) -> Wait[str]:
        """Read white space, and return it."""
        return (yield from self.take_while(_BLANK))

    def piece(self, stops: Sequence[str], *, drops: bool = False) -> Wait[tuple[str, str | None]]:
        """The next piece of text before any of the stops, and the stop that follows it, which is not read.

        ("", None) at the end of the text. No stop may be a part of another. drops: the beginning of a stop at the end
        of the text is dropped.
        """
        while True:
            matches = [(at, stop) for stop in stops if (at := self.text.find(stop, self.at)) >= 0]
            if matches:
                at, stop = min(matches)
                return self._read_to(at), stop
            certain = len(self.text) - held_back(self.text[self.at :], stops)
            if self.ended:
                text = self._read_to(len(self.text))
                return text[: len(text) + certain - len(self.text)] if drops and self.cut else text, None
            if certain > self.at:
                return self._read_to(certain), None
            yield

    def until(self, stops: Sequence[str], say: Callable[[str], None], *, drops: bool = False) -> Wait[str | None]:
        """Emit all text before the first of the stops, piece by piece. Return the stop, which is not read; None at the
        end."""
        while True:
            text, stop = yield from self.piece(stops, drops=drops)
            if text:
                say(text)
            if stop is not None or not text:
                return stop

    def word(self, stops: Sequence[str]) -> Wait[tuple[str, str | None]]:
        """A short text before the first of the stops; None for the stop if the text is longer, or ends before."""
        text = ""
        while True:
            part, stop = yield from self.piece(stops)
            text += part
            if len(text) > _MOST_IN_WORD:
                self.at -= len(text) - _MOST_IN_WORD
                return text[:_MOST_IN_WORD], None
            if stop is not None or not part:
                return text, stop

    def _read_to(self, end: int) -> str:
        text, self.at = self.text[self.at : end], end
        return text
