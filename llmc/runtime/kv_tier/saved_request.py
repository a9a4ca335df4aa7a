"""The record of a request that was swapped out: its tables of blocks, and where the blocks are."""

from dataclasses import dataclass, field

from llmc.runtime.kv_tier.block_store import BlockKey
from llmc.runtime.memory import Bytes
from llmc.runtime.requests.second_reading import SecondReading


@dataclass(frozen=True)
class SavedTable:
    """A request's table of blocks in a group of caches.

    count: its length. places: those whose blocks are in the tier. first, dropped, cut_at: see GroupTable.
    """

    count: int
    places: tuple[int, ...]
    first: int = 0
    dropped: int = 0
    cut_at: int = 0


@dataclass(frozen=True)
class SavedRequest:
    """A request whose blocks are in the second tier. computed: tokens whose keys and values are in its blocks. shared:
    number of the first group's blocks that are not saved here, because they are found by their digests. tables: the
    tables by group. keys: the keys of the saved blocks, in the order of the tables' places. must_return: its tokens
    cannot be computed again with the same bits. reading: the second reading that is under way. arrived: the saved
    blocks, once they have been fetched."""

    computed: int
    shared: int
    tables: tuple[SavedTable, ...]
    keys: tuple[tuple[BlockKey, ...], ...]
    must_return: bool
    reading: SecondReading | None = None
    arrived: dict[BlockKey, Bytes] = field(default_factory=dict)

    @property
    def blocks(self) -> int:
        """Number of blocks in the first group's table."""
        return self.tables[0].count

    @property
    def all_keys(self) -> list[BlockKey]:
        """The keys of all groups' saved blocks."""
        return [key for keys in self.keys for key in keys]
