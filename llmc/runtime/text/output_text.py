"""A request's output as text that grows: whole characters only, cut before the first stop string."""

import copy
from collections.abc import Callable, Iterable, Sequence

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"

# The text of token ids.
Decode = Callable[[Sequence[int]], str]


class OutputText:
    """Decodes token by token in a sliding window, so that the cost of a token does not depend on its position.

    The window starts at a token boundary where the text was complete, one boundary before the text that was already
    sent, because decoders treat the first token of a text specially (as in vLLM's incremental detokenizer).
    keep_stop: the stop string stays in the text. stopped_by: the stop string that was found. pending: how many U+FFFD
    the text would end with if no token followed, for bytes that may still become a character.
    """

    def __init__(self, decode: Decode, stop: tuple[str, ...], *, keep_stop: bool = False) -> None:
        self._decode = decode
        self._stop = stop
        self._keep_stop = keep_stop
        self._ids: list[int] = []
        self._window = 0
        self._boundary = 0
        self._window_taken = 0
        self._text = ""
        self._read = 0
        self.pending = 0
        self.stopped_by: str | None = None

    def fork(self) -> "OutputText":
        """Return another output that begins like this one."""
        other = copy.copy(self)
        other._ids = self._ids.copy()
        return other

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self.stopped_by is not None

    def add(self, token: int, *, may_stop: bool = True) -> None:
        """Take the next token, with which the text may come to hold a stop string. may_stop: whether one counts that
        is complete only now."""
        self._ids.append(token)
        text = self._decode(self._ids[self._window :])
        complete = text.rstrip(INCOMPLETE)
        self.pending = len(text) - len(complete)
        if len(complete) == len(text):
            self._append(text, may_stop)
            self._window, self._boundary = self._boundary, len(self._ids)
            self._window_taken = len(self._decode(self._ids[self._window :]))
        else:
            self._append(complete, may_stop)

    def finish(self) -> None:
        """End the text: bytes that never made a character become U+FFFD."""
        self._append(self._decode(self._ids[self._window :]), may_stop=True)
        self._stop = ()

    def text(self) -> str:
        """All text until now, including text that a stop string may still remove."""
        return self._text

    def read(self) -> str:
        """The text that is certain and was not read before."""
        end = len(self._text) if self.stopped else len(self._text) - held_back(self._text, self._stop)
        piece = self._text[self._read : end]
        self._read = max(self._read, end)
        return piece

    def _append(self, window_text: str, may_stop: bool) -> None:
        piece = window_text[self._window_taken :]
        self._window_taken = max(self._window_taken, len(window_text))
        if not piece or self.stopped:
            return
        end = len(self._text)
        self._text += piece
        if not may_stop:
            return
        # A stop string that ends in the new piece starts at most its length minus one before it.
        matches = [(at, s) for s in self._stop if (at := self._text.find(s, max(0, end - len(s) + 1))) >= 0]
        if matches:
            at, self.stopped_by = min(matches)
            self._text = self._text[: at + len(self.stopped_by) if self._keep_stop else at]


def held_back(text: str, marks: Iterable[str]) -> int:
    """Return the number of characters at the end of a text that could be the beginning of one of the marks."""
    return max((n for mark in marks for n in range(1, len(mark)) if text.endswith(mark[:n])), default=0)
