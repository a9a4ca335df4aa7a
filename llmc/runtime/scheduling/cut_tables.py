"""Tables that were cut, kept for requests with the same tokens and the same cuts, which may begin after their rows."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from llmc.runtime.requests.request_state import GroupTable
from llmc.runtime.scheduling.block_pool import BlockPool

# The content of a block that only tables in here need.
_OF_CUT_TABLES = "of cut tables"


@dataclass(eq=False, slots=True)
class _CutTable:
    """Full blocks of a request's table. dropped, cut_at: see GroupTable. ends: blocks of group 0 that it is found
    by."""

    blocks: tuple[int, ...]
    dropped: int
    cut_at: int
    ends: set[int] = field(default_factory=set)


class CutTables:
    """The cut tables of one group's pool, by the blocks of group 0 that end where the tables end.

    A digest of group 0 after a cut covers the cuts (prefix_cache/cut_marks.py), so a request that finds the block has
    the same ones. A table is found as long as the pool keeps all of its blocks, some of which may also be those of a
    plain prefix or of other tables.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        # With the number of the table's blocks.
        self._by_end: dict[int, tuple[_CutTable, int]] = {}
        self._users: dict[int, set[_CutTable]] = {}

    def __contains__(self, end: int) -> bool:
        return end in self._by_end

    def at(self, end: int) -> GroupTable | None:
        """Return a copy of the table that ends with a block of group 0, or None. Its blocks are not shared yet."""
        if end not in self._by_end:
            return None
        table, count = self._by_end[end]
        return GroupTable(list(table.blocks[:count]), 0, table.dropped, table.cut_at)

    def add(self, table: GroupTable, ends: Mapping[int, int]) -> None:
        """Keep a table whose blocks are held.

        Args:
            table: The table. None of its blocks has been freed.
            ends: By blocks of group 0, the number of the table's blocks that hold the same tokens and those before.
        """
        new = {end: count for end, count in ends.items() if end not in self._by_end}
        if not new:
            return
        kept = _CutTable(tuple(table.blocks[: max(new.values())]), table.dropped, table.cut_at, set(new))
        for end, count in new.items():
            self._by_end[end] = kept, count
        for block in kept.blocks:
            self._users.setdefault(block, set()).add(kept)
        self._pool.keep([block for block in kept.blocks if self._pool.content(block) is None], _OF_CUT_TABLES)

    def move(self, end: int, other: int) -> None:
        """Look up the tables of a block of group 0 by another one with the same tokens from now on."""
        if end in self._by_end and other not in self._by_end:
            table, _ = self._by_end[other] = self._by_end.pop(end)
            table.ends.remove(end)
            table.ends.add(other)
        self.drop((end,))

    def drop(self, ends: Iterable[int]) -> None:
        """Forget the tables that are only found by these blocks of group 0."""
        for end in ends:
            if end in self._by_end:
                table, _ = self._by_end.pop(end)
                table.ends.remove(end)
                if not table.ends:
                    self._forget(table)

    def release(self, block: int) -> None:
        """Stop keeping a block for a plain prefix. It keeps its rows if a table needs them."""
        if block in self._users:
            self._pool.rename(block, _OF_CUT_TABLES)
        else:
            self._pool.forget(block)

    def lose(self, blocks: Iterable[int]) -> None:
        """Forget all tables with one of these blocks, which are about to get other rows."""
        for block in blocks:
            for table in list(self._users.get(block, ())):
                for end in table.ends:
                    del self._by_end[end]
                self._forget(table)

    def _forget(self, table: _CutTable) -> None:
        for block in table.blocks:
            users = self._users[block]
            users.remove(table)
            if not users:
                del self._users[block]
                if self._pool.content(block) == _OF_CUT_TABLES:
                    self._pool.forget(block)
