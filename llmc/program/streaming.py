"""KV compression by age, with positions within the cache (docs/kv-compression.md)."""

from dataclasses import dataclass
from typing import ClassVar

from llmc.program.cache_policy import CachePolicy, Cut, Progress, UnfitError
from llmc.program.compression import LARGEST_BLOCK, Compression
from llmc.program.limits import Limits


@dataclass(frozen=True)
class Streaming(Compression):
    """Keeps the first `sinks` rows and the latest ones. Positions count rows, so they never reach budget + every.

    When `every` rows leave, the keys after them turn back by `every` positions.
    Source: Xiao et al. 2023, "Efficient streaming language models with attention sinks".

    Args:
        budget: number of rows that a cut leaves.
        sinks: number of first rows that stay.
        every: number of tokens from one cut to the next.
    """

    NAME: ClassVar[str] = "streaming"
    IN_GRAPH: ClassVar[bool] = True
    NEWEST_BY: ClassVar[str | None] = None
    BUILT: ClassVar[tuple[str, ...]] = ("sinks",)
    budget: int
    sinks: int = 4
    every: int = LARGEST_BLOCK

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"every={self.every} must be 1 or more")
        if self.budget <= self.sinks:
            raise UnfitError(
                f"budget={self.budget} leaves no room in addition to the {self.sinks} first rows, which stay",
                f"give a budget above {self.sinks}, or fewer sinks",
            )

    @property
    def newest(self) -> int:
        return self.budget - self.sinks

    @property
    def renumbers(self) -> bool:
        return True

    def in_blocks(self) -> tuple[str, ...]:
        return ("budget", "every")

    def next_cut(self, done: Progress) -> int:
        return self.budget + self.every + done.dropped

    def cut(self, done: Progress) -> Cut:
        rows = self.budget + self.every
        sources, destinations = range(self.sinks + self.every, rows), range(self.sinks, self.budget)
        return Cut((range(self.budget, rows),), sources, destinations, chosen=self.budget)

    def most_rows(self, tokens: int) -> int:
        return min(tokens, self.budget + self.every)

    def pool_blocks(self, limits: Limits, blocks: int) -> int:
        return CachePolicy.pool_blocks(self, limits, blocks)

    def runs(self, other: CachePolicy) -> bool:
        return isinstance(other, Streaming) and other.sinks == self.sinks and other.most <= self.most

    @property
    def most(self) -> int:
        """The most rows of a table, for which the pool has room."""
        return self.budget + self.every
