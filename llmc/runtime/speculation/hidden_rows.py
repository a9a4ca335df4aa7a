"""The target's hidden states after its last tokens, until a drafter has read them: by request, and by block for later
requests.

Row i of a drafter's cache is computed from the target's hidden state after token i and from token i + 1. The target
returns a hidden state once, in the step that computes its token; a request that finds the token's block in the prefix
cache gets none. The last hidden state of each block is therefore stored with it, so that a drafter can continue with a
different next token than the one it has read. For drafters with several layers, which read further tokens, the last
states are stored, one per layer.
"""

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


class HiddenRows:
    """A BlockWatcher. kept: hidden states by block."""

    def __init__(self, block_size: int, kept: int = 1) -> None:
        self._block_size, self._kept = block_size, kept
        self._pending: dict[Request, Pending] = {}
        # By block the hidden states of the last tokens that were computed there; starts are places in the block.
        self._last: dict[int, Pending] = {}

    def given(self, blocks: Sequence[int]) -> None:
        """The contents of newly allocated blocks are unknown."""
        for block in blocks:
            self._last.pop(block, None)

    def copied(self, block: int, source: int) -> None:
        """Record that `block` is a copy of `source`, and has the same hidden states."""
        if source in self._last:
            self._last[block] = self._last[source]

    def add(self, request: Request, start: int, hidden: Hidden) -> None:
        """The target has computed these tokens of the request, which keeps them. hidden: copied here."""
        blocks, size, end = request.standing.blocks, self._block_size, start + len(hidden)
        for index in range(start // size, min(len(blocks), -(-end // size))):
            begin, last = index * size, min((index + 1) * size, end)
            first = max(begin, start, last - self._kept)
            self._keep(blocks[index], first - begin, hidden[first - start : last - start])
        before = self._pending.get(request)
        if before is not None and before.start <= start <= before.end:
            hidden = np.concatenate((before.hidden[: start - before.start], hidden))
            start = before.start
        else:
            hidden = hidden.copy()
        self._pending[request] = Pending(start, hidden)

    def _keep(self, block: int, place: int, hidden: Hidden) -> None:
        """Hidden states of a block's last tokens, which begin at a place in it."""
        before = self._last.get(block)
        if before is not None and before.start < place <= before.end:
            kept = np.concatenate((before.hidden[: place - before.start], hidden))[-self._kept :]
            self._last[block] = Pending(place + len(hidden) - len(kept), kept)
        else:
            self._last[block] = Pending(place, hidden.copy())

    def found(self, request: Request, start: int, end: int) -> Hidden | None:
        """The hidden states from one position to before another; None unless all are there, or if there are none."""
        if start >= end:
            return None
        pending = self._pending_from(request, start, end)
        if pending is not None:
            return pending
        index, inside = divmod(start, self._block_size)
        blocks = request.standing.blocks
        last = self._last.get(blocks[index]) if index < len(blocks) else None
        if last is None or not last.start <= inside < last.end:
            return None
        head = last.hidden[inside - last.start :][: end - start]
        if start + len(head) == end:
            return head
        rest = self._pending_from(request, start + len(head), end)
        return None if rest is None else np.concatenate((head, rest))

    def _pending_from(self, request: Request, start: int, end: int) -> Hidden | None:
        pending = self._pending.get(request)
        if pending is None or start < pending.start or pending.end < end:
            return None
        return pending.hidden[start - pending.start : end - pending.start]

    def pending(self, request: Request) -> Pending | None:
        """The pending hidden states of a request itself, not of its blocks."""
        return self._pending.get(request)

    def read(self, request: Request, end: int) -> None:
        """Drop the hidden states before a position."""
        pending = self._pending.get(request)
        if pending is not None and pending.start < end:
            left = pending.hidden[end - pending.start :]
            if len(left):
                self._pending[request] = Pending(end, left.copy())
            else:
                del self._pending[request]

    def forget(self, request: Request) -> None:
        """The request has ended; the states of its blocks may serve others."""
        self._pending.pop(request, None)
