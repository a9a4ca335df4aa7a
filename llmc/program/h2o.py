"""KV compression by accumulated attention (docs/kv-compression.md)."""

from dataclasses import dataclass
from typing import ClassVar

from llmc.program.cache_policy import CachePolicy, Cut, Nearest, Progress
from llmc.program.scored_compression import Scored

# The kernel has room for this number of queries.
_MOST_QUERIES = 128


@dataclass(frozen=True)
class H2O(Scored):
    """A row's score is the sum of the attention that all queries since its own have paid to it.

    Attention is added up after every `every` tokens, of a prompt too. Once the prompt has been read, rows leave then.
    Source: Zhang et al. 2023, "H2O: Heavy-Hitter Oracle for efficient generative inference of large language models".
    """

    NAME: ClassVar[str] = "h2o"
    BUILT: ClassVar[tuple[str, ...]] = ("every", "sinks", "recent")
    recent: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.every > _MOST_QUERIES:
            raise ValueError(f"every={self.every} is not a number of queries from 1 to {_MOST_QUERIES}")

    @property
    def queries(self) -> CachePolicy:
        return Nearest(window=self.every + 1)

    def next_cut(self, done: Progress) -> int:
        return done.cut_at + self.every

    def cut(self, done: Progress) -> Cut:
        end, kept = self.next_cut(done), self.kept(done.prompt)
        rows = end - done.dropped
        if end < done.prompt or rows <= kept:
            return Cut((), chosen=rows)
        return Cut((range(kept, rows),), chosen=kept)
