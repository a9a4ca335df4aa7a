"""KV compression by the attention of a prompt's last queries (docs/kv-compression.md)."""

from dataclasses import dataclass
from typing import ClassVar

from llmc.program.cache_policy import CachePolicy, Nearest
from llmc.program.scored_compression import MOST_QUERIES, Scored


@dataclass(frozen=True)
class SnapKV(Scored):
    """A row's score is the attention that the last `window` queries pay to it, averaged over `pool` neighbours.

    Source: Li et al. 2024, "SnapKV: LLM knows what you are looking for before generation".
    """

    NAME: ClassVar[str] = "snapkv"
    BUILT: ClassVar[tuple[str, ...]] = ("window", "pool", "sinks")
    NEWEST_BY: ClassVar[str | None] = "window"
    window: int = 64
    pool: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.window <= MOST_QUERIES:
            raise ValueError(f"window={self.window} is not a number of queries from 1 to {MOST_QUERIES}")
        if self.pool % 2 == 0 or self.pool > 63:
            raise ValueError(f"pool={self.pool} is not an odd number of rows up to 63")

    @property
    def recent(self) -> int:
        return self.window

    @property
    def queries(self) -> CachePolicy:
        return Nearest(window=self.window + 1)
