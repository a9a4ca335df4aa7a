"""Which rows of its requests a draft is yet to read: of what the target has computed, less what is in its cache.

Row i of a draft's cache is made of the target's hidden state after token i and of token i + 1; that of its next layer,
if it has several, of what the first one made of row i and of token i + 2, and so on. A row is called by the last of its
layers' tokens, and known when it is right in all of them.
"""

from collections.abc import Sequence
from typing import NamedTuple, overload

from llmc.runtime.executors.executor import Executor
from llmc.runtime.requests.request import SampledRequest
from llmc.runtime.speculation.draft_cache import DraftCache
from llmc.runtime.speculation.hidden_rows import Hidden, HiddenRows
from llmc.runtime.speculation.hidden_step import HiddenReading


class Unread(NamedTuple):
    """Rows `start`… of a request, one for each hidden state of the target's: [rows, width]."""

    request: SampledRequest
    start: int
    hidden: Hidden

    def first(self, count: int) -> "Unread":
        """The first of them."""
        return self._replace(hidden=self.hidden[:count])


class UnreadRows:
    """A BlockWatcher. layers: of the draft, with caches in blocks of the same numbers."""

    def __init__(self, layers: Sequence[Executor], block_size: int) -> None:
        self._layers, self._size = len(layers), block_size
        self._cache = DraftCache(layers, block_size)
        self._rows = HiddenRows(block_size, kept=self._layers)

    def given(self, blocks: Sequence[int]) -> None:
        self._cache.given(blocks)
        self._rows.given(blocks)

    def copied(self, block: int, source: int) -> None:
        self._cache.copied(block, source)
        self._rows.copied(block, source)

    def add(self, request: SampledRequest, start: int, hidden: Hidden) -> None:
        """The target has computed these tokens of the request, which keeps them. hidden: copied here."""
        self._rows.add(request, start, hidden)

    def forget(self, request: SampledRequest) -> None:
        """What it has read may serve others."""
        self._cache.forget(request)
        self._rows.forget(request)

    def complete(self, rows: Unread) -> Unread:
        """Those whose tokens of all layers are there: no layer reads drafts in them."""
        return rows.first(max(0, len(rows.request.tokens) - self._layers - rows.start))

    def of_prompt(self, request: SampledRequest) -> Unread | None:
        """Complete rows, but for the last of what was computed, whose step gives the first draft. None if there are
        none, or if hidden states are missing."""
        pending = self._rows.pending(request)
        if pending is None:
            return None
        return self._rest(request, min(pending.end - 1, len(request.tokens) - self._layers), is_last=False)

    def to_the_last(self, request: SampledRequest) -> Unread | None:
        """Up to the last row, which is read again in any case; None if hidden states are missing."""
        return self._rest(request, len(request.tokens) - 1)

    def read(self, rows: Unread) -> None:
        """All layers read these now."""
        names = _Shifted(rows.request.tokens, self._layers)
        end = rows.start + len(self.complete(rows).hidden)
        self._cache.note(rows.request, rows.start, names[rows.start : end])
        self._rows.read(rows.request, end)

    def reading(self, rows: Unread, layer: int, drafts: Sequence[int]) -> HiddenReading:
        """What a layer reads: the first of them has number 0. drafts: that follow the request's tokens."""
        first = rows.start + layer + 1
        tokens = [*rows.request.tokens[first : first + len(rows.hidden)], *drafts][: len(rows.hidden)]
        return self.place(rows.request, rows.start, tokens, rows.hidden)

    def place(self, request: SampledRequest, start: int, tokens: Sequence[int], hidden: Hidden) -> HiddenReading:
        """Tokens to be read into rows `start`…, in the request's blocks."""
        begin = self._cache.skipped(request)
        return HiddenReading(request.standing.blocks[begin:], begin * self._size, start, tokens, hidden)

    def _rest(self, request: SampledRequest, end: int, is_last: bool = True) -> Unread | None:
        """The rows of a request before `end` that are yet to be read, the last one in any case if `is_last`; None if
        there are none, or if their hidden states are not all there."""
        names = _Shifted(request.tokens, self._layers)
        start = min(self._cache.known(request, names), end - is_last)
        found = self._rows.found(request, start, end)
        if found is None and self._rows.found(request, end - 1, end) is not None:
            # What comes between is lost: the cache begins behind it.
            pending = self._rows.pending(request)
            if pending is not None and pending.start > start:
                self._cache.skip(request, -(-pending.start // self._size))
                start = min(self._cache.known(request, names), end - is_last)
                found = self._rows.found(request, start, end)
        if found is None or start < self._cache.skipped(request) * self._size:
            return None
        return Unread(request, start, found)


class _Shifted(Sequence[int]):
    """What rows of a draft's cache are called: each by the token so many places behind its own."""

    def __init__(self, tokens: list[int], places: int) -> None:
        self._tokens, self._places = tokens, places

    def __len__(self) -> int:
        return max(0, len(self._tokens) - self._places)

    @overload
    def __getitem__(self, key: int) -> int: ...
    @overload
    def __getitem__(self, key: slice) -> list[int]: ...
    def __getitem__(self, key: int | slice) -> int | list[int]:
        if isinstance(key, int):
            return self._tokens[key + self._places]
        start, stop, _ = key.indices(len(self))
        return self._tokens[start + self._places : stop + self._places]
