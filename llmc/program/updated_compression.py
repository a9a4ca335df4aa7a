"""Cache policies whose scores depend on all queries since a row was written.

After every `every` tokens, including those of a prompt, the queries since the last update change the scores. Rows leave
at updates after the prompt.
"""

from dataclasses import dataclass
from typing import ClassVar

from llmc.program.cache_policy import CachePolicy, Cut, Nearest, Progress
from llmc.program.scored_compression import MOST_QUERIES, Scored


@dataclass(frozen=True)
class Updated(Scored):
    """Keeps the last `recent` rows whatever their scores."""

    NAME: ClassVar[str] = ""
    BUILT: ClassVar[tuple[str, ...]] = ("every", "sinks", "recent")
    recent: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.every > MOST_QUERIES:
            raise ValueError(f"every={self.every} is not a number of queries from 1 to {MOST_QUERIES}")

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
