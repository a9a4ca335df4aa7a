"""Records attached to a request while it is served: four records, each written by one file only."""

from dataclasses import dataclass, field

from llmc.runtime.prefix_cache.chain import Chain
from llmc.runtime.prefix_cache.cut_marks import CutMarks
from llmc.runtime.requests.second_reading import SecondReading


@dataclass(eq=False, slots=True)
class GroupTable:
    """Blocks of a group of layers that do not keep everything, by row // block_size.

    Blocks before `first` are freed, except those that the policy pins. dropped: rows that have left the table: the
    row of a token is its position less these. A multiple of the block size. cut_at: tokens at the last cut, 0 for none.
    """

    blocks: list[int]
    first: int
    dropped: int = 0
    cut_at: int = 0


@dataclass(eq=False, slots=True)
class Standing:
    """Written by scheduler.py and request_blocks.py.

    sequence: order of arrival. is_waiting: in a queue. seat: which of max_sequences it has while it holds blocks: the
    slot of its states, where the model has some. started: when it first got one, as Request.arrived counts.
    cached_tokens: number of tokens found in the prefix cache then. blocks: the blocks of the KV cache, in order of
    position. groups: tables of the groups of caches after the first. computed: see Request.computed, which also covers
    requests that decode. reading: while the request reads its prompt again; `computed` then also counts the tokens of
    the part.
    """

    sequence: int = 0
    is_waiting: bool = False
    seat: int | None = None
    started: float | None = None
    cached_tokens: int = 0
    blocks: list[int] = field(default_factory=list)
    groups: tuple[GroupTable, ...] = ()
    computed: int = 0
    reading: SecondReading | None = None

    def table(self, group: int) -> list[int]:
        """The blocks of a group of caches."""
        return self.groups[group - 1].blocks if group else self.blocks

    def dropped(self, group: int) -> int:
        """Return the number of rows that a group of caches has fewer than the request has positions."""
        return self.groups[group - 1].dropped if group else 0

    def slot(self, group: int, position: int, block_size: int) -> int:
        """The row of a group's caches that holds the token at this position."""
        block, place = divmod(position - self.dropped(group), block_size)
        return self.table(group)[block] * block_size + place

    @property
    def is_seated(self) -> bool:
        """Whether it runs, or is parked with its blocks."""
        return self.seat is not None


@dataclass(eq=False, slots=True)
class Decoding:
    """Written by decode_set.py, which documents them. place: None for a request that does not decode."""

    place: int | None = None
    phase: int = 0


@dataclass(eq=False, slots=True)
class KnownPrefix:
    """Written by prefix_cache.py. digests: digests of the request's first blocks, computed on demand. common: number of
    blocks in common with others at its start, usable or not. registered: number of its blocks that the cache knows;
    chain: the last of them. marks: the request's cuts; None until they are needed."""

    digests: list[bytes] = field(default_factory=list)
    common: int = 0
    registered: int = 0
    chain: Chain | None = None
    marks: CutMarks | None = None


@dataclass(eq=False, slots=True)
class KnownStates:
    """Written by state_snapshots.py. stops: where its next chunks have to end, to be kept there. kept: the position of
    the last snapshot that it has taken or begun from; latest: the block of the last one in its answer."""

    stops: list[int] = field(default_factory=list)
    kept: int = 0
    latest: int | None = None
