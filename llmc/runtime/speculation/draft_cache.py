"""The contents of a second engine's cache, whose blocks have the same numbers as the first one's.

A request's block table is valid for both caches. But the second engine may lag behind: it reads nothing while no
request drafts, and it may have read rejected drafts. The tokens of each block's rows are therefore recorded. The record
outlives the request, as the block's content in the prefix cache does, and ends when the block is reallocated.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from llmc.runtime.executors.executor import Executor
from llmc.runtime.requests.request import Request


@dataclass(slots=True)
class _Place:
    """A request's table, which is another list after its blocks were allocated again, and the number of its first
    blocks that are full and hold its tokens: this does not change while the request holds them. skipped: number of
    these blocks that hold nothing and must not be read."""

    blocks: list[int]
    checked: int = 0
    skipped: int = 0


class DraftCache:
    """Tokens by block; a BlockWatcher. A row's token is any value that names it: a row depends on its token and on the
    rows before it. executors: all have read the same rows."""

    def __init__(self, executors: Sequence[Executor], block_size: int) -> None:
        self._executors = executors
        self._block_size = block_size
        self._tokens: dict[int, list[int]] = {}
        self._places: dict[Request, _Place] = {}

    def given(self, blocks: Sequence[int]) -> None:
        """The contents of newly allocated blocks are unknown."""
        for block in blocks:
            self._tokens.pop(block, None)

    def copied(self, block: int, source: int) -> None:
        """Copy at once: no step of the second engine runs between the plan and the first engine's copy."""
        tokens = self._tokens.get(source)
        if tokens:
            for executor in self._executors:
                executor.copy_blocks({block: source})
            self._tokens[block] = tokens.copy()

    def known(self, request: Request, tokens: Sequence[int]) -> int:
        """Number of these tokens whose rows are in the request's blocks. The tokens are the request's own and never
        change."""
        blocks, size = request.standing.blocks, self._block_size
        place = self._place(request)
        for index in range(place.checked, len(blocks)):
            begin = index * size
            held, own = self._tokens.get(blocks[index], ()), tokens[begin : begin + size]
            if held != own or len(own) < size:
                common = takewhile(lambda pair: pair[0] == pair[1], zip(held, own, strict=False))
                return begin + sum(1 for _ in common)
            place.checked = index + 1
        return min(len(tokens), place.checked * size)

    def skip(self, request: Request, blocks: int) -> None:
        """Skip the rows of the request's first `blocks` blocks: reading begins after them."""
        place = self._place(request)
        place.checked = place.skipped = blocks

    def skipped(self, request: Request) -> int:
        """Number of skipped blocks."""
        return self._place(request).skipped

    def note(self, request: Request, start: int, tokens: Sequence[int]) -> None:
        """Record that the rows of these tokens are written from position `start` on; `known` was at least `start`."""
        blocks, size = request.standing.blocks, self._block_size
        for index in range(start // size, len(blocks)):
            begin = index * size
            held = self._tokens.get(blocks[index], [])
            kept = held[: max(0, start - begin)]
            added = tokens[max(0, begin - start) : max(0, begin + size - start)]
            if not (held or added):
                break
            # Later rows of this block and of later blocks followed other tokens.
            self._tokens[blocks[index]] = [*kept, *added]

    def forget(self, request: Request) -> None:
        """The request has ended; the contents of its blocks may serve others."""
        self._places.pop(request, None)

    def _place(self, request: Request) -> _Place:
        place = self._places.get(request)
        if place is None or place.blocks is not request.standing.blocks:
            place = self._places[request] = _Place(request.standing.blocks)
        return place
