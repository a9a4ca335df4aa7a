"""KV compression by leverage and attention within a text, whatever its last tokens ask (docs/kv-compression.md)."""

from dataclasses import dataclass
from typing import ClassVar

from llmc.program.cache_policy import CachePolicy, Cut, Nearest, Progress
from llmc.program.scored_compression import Scored

# The maximum number of tokens of a chunk, whose queries are kept in a separate cache.
LONGEST_CHUNK = 256


@dataclass(frozen=True)
class Compactor(Scored):
    """A row's score blends its key's statistical leverage with the attention that its own chunk pays to it.

    The queries of a chunk are read where it ends, so only theirs are kept. A table is cut where the first block begins
    at or after the end of the prompt, which ends the prompt's last chunk, and then after every `every` tokens, which
    are a chunk each.
    Source: Chari and Van Durme 2025, "Compactor: Calibrated query-agnostic KV cache compression with approximate
    leverage scores".

    Args:
        recent: Number of last rows that are kept whatever their scores, at least 1.
        chunk: Number of tokens of a prompt that attend to each other.
    """

    NAME: ClassVar[str] = "compactor"
    BUILT: ClassVar[tuple[str, ...]] = ("chunk", "recent", "sinks")
    sinks: int = 8
    recent: int = 4
    chunk: int = LONGEST_CHUNK

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.recent < 1:
            raise ValueError(f"recent={self.recent} must be 1 or more: the last row's position determines later ones")
        if not 1 <= self.chunk <= LONGEST_CHUNK:
            raise ValueError(f"chunk={self.chunk} is not a number of queries from 1 to {LONGEST_CHUNK}")
        if self.every > self.chunk:
            raise ValueError(f"every={self.every} is more than chunk={self.chunk}, whose queries are kept")

    @property
    def queries(self) -> CachePolicy:
        return Nearest(window=self.chunk + 1)

    def in_blocks(self) -> tuple[str, ...]:
        return (*super().in_blocks(), "chunk")

    def next_cut(self, done: Progress) -> int:
        read = self._whole(done.prompt)
        return min(done.cut_at + self.chunk, read) if done.cut_at < read else done.cut_at + self.every

    def cut(self, done: Progress) -> Cut:
        end, kept = self.next_cut(done), self.kept(done.prompt)
        rows, queries = end - done.dropped, end - done.cut_at
        if end < done.prompt or rows <= kept:
            return Cut((), chosen=rows, queries=queries)
        return Cut((range(kept, rows),), chosen=kept, queries=queries)
