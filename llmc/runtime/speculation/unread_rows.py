"""The rows of requests that a drafter has not read: those computed by the target minus those in the drafter's cache.

Row i of a drafter's cache is computed from the target's hidden state after token i and from token i + 1. If there is a
next layer, its row i is computed from the first layer's row i and from token i + 2, and so on. A row is named by the
last of its layers' tokens, and is known if it is right in all layers.
"""

from collections.abc import Sequence
from typing import NamedTuple, overload

from llmc.runtime.executors.executor import Executor
from llmc.runtime.requests.request import SampledRequest
from llmc.runtime.speculation.draft_cache import DraftCache
from llmc.runtime.speculation.hidden_rows import Hidden, HiddenRows
from llmc.runtime.speculation.hidden_step import HiddenReading


class Unread(NamedTuple):
    """Rows `start`… of a request, one for each of the target's hidden states: [rows, width]."""

    request: SampledRequest
    start: int
    hidden: Hidden

    def first(self, count: int) -> "Unread":
        """The first of them."""
        return self._replace(hidden=self.hidden[:count])


class UnreadRows:
    """A BlockWatcher. layers: number of the draft's layers, whose caches have blocks of the same numbers."""

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
        """Drop the request; its cached rows may serve other requests."""
        self._cache.forget(request)
        self._rows.forget(request)

    def complete(self, rows: Unread) -> Unread:
        """The rows whose tokens of all layers exist, so that no layer reads drafts in them."""
        return rows.first(max(0, len(rows.request.tokens) - self._layers - rows.start))

    def of_prompt(self, request: SampledRequest) -> Unread | None:
        """Complete rows, except the last computed one, whose step gives the first draft. None if there are none, or if
        hidden states are missing."""
        pending = self._rows.pending(request)
        if pending is None:
            return None
        return self._rest(request, min(pending.end - 1, len(request.tokens) - self._layers), is_last=False)

    def to_the_last(self, request: SampledRequest) -> Unread | None:
        """Return the rows up to the last one, which is read again in any case; None if hidden states are missing."""
        return self._rest(request, len(request.tokens) - 1)

    def read(self, rows: Unread) -> None:
        """Record that all layers read these now."""
        names = _Shifted(rows.request.tokens, self._layers)
        end = rows.start + len(self.complete(rows).hidden)
        self._cache.note(rows.request, rows.start, names[rows.start : end])
        self._rows.read(rows.request, end)

    def reading(self, rows: Unread, layer: int, drafts: Sequence[int]) -> HiddenReading:
        """The reading of a layer, numbered from 0. drafts: the drafts after the request's tokens."""
        first = rows.start + layer + 1
        tokens = [*rows.request.tokens[first : first + len(rows.hidden)], *drafts][: len(rows.hidden)]
        return self.place(rows.request, rows.start, tokens, rows.hidden)

    def place(self, request: SampledRequest, start: int, tokens: Sequence[int], hidden: Hidden) -> HiddenReading:
        """Tokens to be read into rows `start`…, in the request's blocks."""
        begin = self._cache.skipped(request)
        return HiddenReading(request.standing.blocks[begin:], begin * self._size, start, tokens, hidden)

    def _rest(self, request: SampledRequest, end: int, is_last: bool = True) -> Unread | None:
        """The unread rows of a request before `end`, with the last one in any case if `is_last`; None if there are
        none, or if some of their hidden states are missing."""
        names = _Shifted(request.tokens, self._layers)
        start = min(self._cache.known(request, names), end - is_last)
        rows = self._rows.found(request, start, end)
        if rows is None and self._rows.found(request, end - 1, end) is not None:
            # The rows in between are lost: the cache begins after them.
            pending = self._rows.pending(request)
            if pending is not None and pending.start > start:
                self._cache.skip(request, -(-pending.start // self._size))
                start = min(self._cache.known(request, names), end - is_last)
                rows = self._rows.found(request, start, end)
        if rows is None or start < self._cache.skipped(request) * self._size:
            return None
        return Unread(request, start, rows)


class _Shifted(Sequence[int]):
    """The names of rows in a drafter's cache: the token `by` places after the row's own."""

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
