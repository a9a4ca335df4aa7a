"""Which blocks requests have, in every group of caches: all tables of a request grow, part and end together."""

from collections.abc import Iterable, Sequence

from llmc.program import Limits
from llmc.runtime.requests.request import Request
from llmc.runtime.requests.request_state import WindowTable
from llmc.runtime.scheduling.block_pool import BlockPool
from llmc.runtime.scheduling.step_plan import StepOutline
from llmc.runtime.scheduling.window_pool import WindowPool


class RequestBlocks:
    """The blocks of `pool`, which hold every token of a request, and of `windows`, which hold those near its end."""

    def __init__(self, limits: Limits, pool: BlockPool, windows: Sequence[WindowPool] = ()) -> None:
        self._pool, self._limits = pool, limits
        self.windows = tuple(windows)

    def fit(self, count: int) -> bool:
        """Whether so many are left in every pool."""
        return count <= self._pool.available and all(count <= window.pool.available for window in self.windows)

    def append(self, requests: Iterable[Request], count: int) -> None:
        """One more for each of the `count` requests; they must fit."""
        for request, block in zip(requests, self._pool.allocate(count), strict=True):
            request.standing.blocks.append(block)
        for group, window in enumerate(self.windows):
            for request, block in zip(requests, window.pool.allocate(count), strict=True):
                request.standing.windows[group].blocks.append(block)

    def extend(self, request: Request, count: int) -> None:
        """So many more for a request; they must fit."""
        own = request.standing
        own.blocks += self._pool.allocate(count)
        for window, table in self._tables(request):
            table.blocks += window.pool.allocate(count)

    def cut(self, request: Request, count: int) -> None:
        """Leave the request that many."""
        own = request.standing
        while len(own.blocks) > count:
            self._pool.release((own.blocks.pop(),))
            for window, table in self._tables(request):
                window.pool.release((table.blocks.pop(),))

    def retire(self, request: Request) -> None:
        """Give back what no later token of the request looks at."""
        for window, table in self._tables(request):
            window.retire(request, table)

    def can_start(self, found: Sequence[int], tokens: int, others: Sequence[Request]) -> bool:
        """Whether there is room for a request of so many tokens behind the blocks that were found, and for what the
        others, which run, still need for the tokens that they have."""
        missing, pool = self._limits.blocks_for(tokens) - len(found), self._pool
        revived = sum(not pool.holders(block) for block in found) if found else 0
        lacks = [max(0, self._limits.blocks_for(len(r.tokens)) - len(r.standing.blocks)) for r in others]
        if missing + revived + sum(lacks) > pool.available:
            return False
        for group, window in enumerate(self.windows):
            tables = [request.standing.windows[group] for request in others]
            held = [len(table.blocks) - table.first for table in tables]
            promised = sum(min(lack, max(0, window.most - own)) for lack, own in zip(lacks, held, strict=True))
            if min(missing + window.revived(found), window.most) + promised > window.pool.available:
                return False
        return True

    def start(self, request: Request, found: Sequence[int], count: int) -> None:
        """Let the request begin on the blocks that were found, with as many more as make `count`."""
        own = request.standing
        if found:
            self._pool.share(found)
        own.blocks = list(found)
        own.windows = tuple(window.start(found) for window in self.windows)
        self.extend(request, count - len(found))

    def fork(self, parent: Request, child: Request) -> None:
        """Let the child begin on the parent's blocks, as far as they hold what it has computed."""
        first, own = parent.standing, child.standing
        count = self._limits.blocks_for(own.computed)
        own.blocks = first.blocks[:count]
        self._pool.share(own.blocks)
        own.windows = tuple(WindowTable(table.blocks[:count], table.first) for table in first.windows)
        for window, table in self._tables(child):
            window.pool.share(table.blocks[table.first :])

    def can_write(self, request: Request, index: int, end: int) -> bool:
        """Whether there is room for the request to write from its block `index` to before `end`."""
        own = request.standing
        lacks = max(0, end - len(own.blocks))
        pools = ((self._pool, own.blocks), *((w.pool, t.blocks) for w, t in self._tables(request)))
        return all(lacks + _is_shared(pool, blocks, index) <= pool.available for pool, blocks in pools)

    def write(self, request: Request, index: int, end: int, outline: StepOutline) -> None:
        """Make the blocks from `index` to before `end` the request's own; there must be room."""
        own = request.standing
        _part(self._pool, own.blocks, index, outline.copies)
        for group, (window, table) in enumerate(self._tables(request), 1):
            _part(window.pool, table.blocks, index, outline.window_copies.setdefault(group, {}))
        if end > len(own.blocks):
            self.extend(request, end - len(own.blocks))

    def release(self, request: Request) -> None:
        """Give all back."""
        own = request.standing
        for window, table in self._tables(request):
            window.pool.release(table.blocks[table.first :])
        if own.blocks:
            self._pool.release(own.blocks)
        own.blocks, own.windows = [], ()

    def _tables(self, request: Request) -> Iterable[tuple[WindowPool, WindowTable]]:
        """None of a request that holds nothing."""
        return zip(self.windows, request.standing.windows, strict=False)


def _is_shared(pool: BlockPool, blocks: Sequence[int], index: int) -> bool:
    return index < len(blocks) and pool.holders(blocks[index]) > 1


def _part(pool: BlockPool, blocks: list[int], index: int, copies: dict[int, int]) -> None:
    if _is_shared(pool, blocks, index):
        own = pool.part(blocks[index])
        copies[own], blocks[index] = blocks[index], own
