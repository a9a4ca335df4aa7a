"""What a target knew after its last tokens, until a draft has read it: by request, and by block for who comes later.

Row i of a draft's cache is made of the target's hidden state after token i and of token i + 1. The target gives a
hidden state once, in the step that computes its token; who finds the token's block in the prefix cache gets none. So
the last hidden state of each block is kept beside it: with it a draft can go on where another token follows than the
one it has read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llmc.runtime.requests.request import Request

Hidden = npt.NDArray[np.float32]


@dataclass(slots=True)
class Pending:
    """Hidden states of a request's tokens from position `start` on: [tokens, width]."""

    start: int
    hidden: Hidden

    @property
    def end(self) -> int:
        """The position after the last one."""
        return self.start + len(self.hidden)


_NOTHING: tuple[int | None, Hidden] = (None, np.empty(0, np.float32))


class HiddenRows:
    """A BlockWatcher."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._pending: dict[Request, Pending] = {}
        # The place in its block of the last token that was computed there, and its hidden state.
        self._last: dict[int, tuple[int, Hidden]] = {}

    def given(self, blocks: Sequence[int]) -> None:
        """Nothing is known of them."""
        for block in blocks:
            self._last.pop(block, None)

    def copied(self, block: int, source: int) -> None:
        """The same is known of both."""
        if source in self._last:
            self._last[block] = self._last[source]

    def add(self, request: Request, start: int, hidden: Hidden) -> None:
        """The target has computed these tokens of the request, which keeps them. hidden: copied here."""
        before = self._pending.get(request)
        if before is not None and before.start <= start <= before.end:
            hidden = np.concatenate((before.hidden[: start - before.start], hidden))
            start = before.start
        else:
            hidden = hidden.copy()
        self._pending[request] = Pending(start, hidden)
        blocks, size = request.standing.blocks, self._block_size
        ends = range(start // size, min(len(blocks), -(-(start + len(hidden)) // size)))
        for index in ends:
            last = min((index + 1) * size, start + len(hidden)) - 1
            self._last[blocks[index]] = (last - index * size, hidden[last - start].copy())

    def found(self, request: Request, start: int, end: int) -> Hidden | None:
        """The hidden states from one position to before another; None unless all are there, or if there are none."""
        pending = self._pending.get(request)
        if start >= end:
            return None
        if pending is not None and pending.start <= start and end <= pending.end:
            return pending.hidden[start - pending.start : end - pending.start]
        index, inside = divmod(start, self._block_size)
        blocks = request.standing.blocks
        place, hidden = self._last.get(blocks[index], _NOTHING) if index < len(blocks) else _NOTHING
        if place != inside:
            return None
        if end == start + 1:
            return hidden[None]
        rest = self.found(request, start + 1, end) if pending is not None and pending.start == start + 1 else None
        return None if rest is None else np.concatenate((hidden[None], rest))

    def first(self, request: Request) -> int | None:
        """The first position that a request has a hidden state of, not of its blocks."""
        pending = self._pending.get(request)
        return None if pending is None else pending.start

    def end(self, request: Request) -> int | None:
        """The position after the last one that it has one of."""
        pending = self._pending.get(request)
        return None if pending is None else pending.end

    def read(self, request: Request, end: int) -> None:
        """What comes before a position is needed no more."""
        pending = self._pending.get(request)
        if pending is not None and pending.start < end:
            left = pending.hidden[end - pending.start :]
            if len(left):
                self._pending[request] = Pending(end, left.copy())
            else:
                del self._pending[request]

    def forget(self, request: Request) -> None:
        """It has ended; what its blocks keep may serve others."""
        self._pending.pop(request, None)
