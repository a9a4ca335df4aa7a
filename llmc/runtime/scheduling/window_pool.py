"""The blocks of layers that do not see everything, and which of them hold what others may go on from."""

from collections.abc import Iterable, Sequence

from llmc.program import Limits, Program, Reach
from llmc.runtime.engine_stats import WindowStats
from llmc.runtime.requests.request import Request
from llmc.runtime.requests.request_state import WindowTable
from llmc.runtime.scheduling.block_pool import BlockPool


class WindowPool:
    """One group's pool of `count` blocks. slack: rows more than its reach that a step may look at.

    A full block keeps as its content the block of the first group that holds the same tokens: who has found that one
    has found both. So this pool knows no digests, and what the prefix cache forgets is forgotten here.
    """

    def __init__(self, reach: Reach, count: int, limits: Limits, slack: int = 0) -> None:
        self.pool = BlockPool(count)
        self.pool.tell_losses(self._lose)
        self._reach, self._slack, self._size = reach, slack, limits.block_size
        self.most = reach.blocks_of_sequence(limits, limits.max_batch_tokens + slack)
        # By block of the first group.
        self._kept: dict[int, int] = {}

    @property
    def stats(self) -> WindowStats:
        """Its blocks at this moment."""
        return WindowStats(str(self._reach), self.pool.count, self.pool.used, self.pool.cached)

    def first_block(self, position: int) -> int:
        """The first that a token in this position, or behind it, looks at."""
        return self._reach.first_row(max(0, position - self._slack)) // self._size

    def lacking(self, found: Sequence[int], end: int) -> int | None:
        """Which of found[:end] is the last, of those that the next token looks at, without its block here; None if all
        have theirs."""
        for place in range(end - 1, self.first_block(end * self._size) - 1, -1):
            if found[place] not in self._kept:
                return place
        return None

    def revived(self, found: Sequence[int]) -> int:
        """How many of the blocks that go with these nobody holds."""
        first = self.first_block(len(found) * self._size)
        return sum(not self.pool.holders(self._kept[block]) for block in found[first:])

    def start(self, found: Sequence[int]) -> WindowTable:
        """The table of a request that begins behind the blocks that were found, all of which are there."""
        first = self.first_block(len(found) * self._size)
        own = [self._kept[block] for block in found[first:]]
        self.pool.share(own)
        return WindowTable([0] * first + own, first)

    def retire(self, request: Request, table: WindowTable) -> None:
        """Give back what no later token of the request looks at."""
        first = self.first_block(request.computed)
        if first > table.first:
            self.keep(request, table, request.prefix.registered, first)
            # The next request parts from others where this one did, sooner than anywhere else.
            end = min(first, max(table.first, request.prefix.common))
            begin = min(end, max(table.first, self.first_block(request.prefix.common * self._size)))
            self.pool.release(table.blocks[table.first : begin], least=True)
            self.pool.release(table.blocks[begin:end])
            self.pool.release(table.blocks[end:first], least=True)
            table.first = first

    def keep(self, request: Request, table: WindowTable, begin: int, end: int) -> None:
        """The request's blocks from `begin` to before `end` are full; they will be found if the first group's are."""
        if request.salt is None:
            return
        for place in range(max(begin, table.first), end):
            block, own = request.standing.blocks[place], table.blocks[place]
            if block not in self._kept:
                self._kept[block] = own
                self.pool.keep((own,), block)

    def move(self, block: int, other: int) -> None:
        """The two blocks of the first group hold the same tokens, and only the other one will be found."""
        own = self._kept.pop(block, None)
        if own is None:
            return
        if other in self._kept:
            self.pool.forget(own)
        else:
            self._kept[other] = own
            self.pool.rename(own, other)

    def drop(self, blocks: Iterable[int]) -> None:
        """These of the first group will not be found, or hold something else soon."""
        for block in blocks:
            own = self._kept.pop(block, None)
            if own is not None:
                self.pool.forget(own)

    def _lose(self, blocks: Sequence[int], contents: Sequence[object]) -> None:
        for block in contents:
            assert isinstance(block, int)
            del self._kept[block]


def window_pools(program: Program, blocks: int, slack: int = 0) -> tuple[WindowPool, ...]:
    """Of a program's groups of caches behind the first, which has so many blocks."""
    _, *counts = program.group_blocks(blocks)
    return tuple(
        WindowPool(reach, count, program.limits, slack) for reach, count in zip(program.reaches, counts, strict=True)
    )


def usable(windows: Sequence[WindowPool], found: Sequence[int]) -> int:
    """How many of the blocks that were found a request can begin behind."""
    end = len(found)
    while end:
        lacking = [place for window in windows if (place := window.lacking(found, end)) is not None]
        if not lacking:
            break
        end = min(lacking)
    return end
