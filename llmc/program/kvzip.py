"""KV compression by the attention of a second reading of the prompt (docs/kv-compression.md)."""

from dataclasses import dataclass, replace
from itertools import count
from typing import ClassVar

from llmc.program.cache_policy import CachePolicy, Cut, Nearest, Progress
from llmc.program.scored_compression import MOST_QUERIES, Scored


@dataclass(frozen=True)
class KVzip(Scored):
    """A row's score is the largest attention that a query pays to it while the model reads the prompt again.

    A table is cut once, a block before the end of the prompt, so that requests with the same prompt find it after the
    cut. The rows of the last tokens and of the answer stay.
    Source: Kim et al. 2025, "KVzip: Query-agnostic KV cache compression with context reconstruction".

    Args:
        every: Number of tokens of the second reading whose queries update the scores together.
        sinks: Number of first rows that are kept whatever their scores.
        chunk: Number of tokens of the prompt that are read again at once.
        prefix: Number of first tokens of the prompt that are compressed; None for all.
    """

    NAME: ClassVar[str] = "kvzip"
    READS_AGAIN: ClassVar[bool] = True
    NEWEST_BY: ClassVar[str | None] = None
    BUILT: ClassVar[tuple[str, ...]] = ("every", "sinks")
    sinks: int = 4
    chunk: int = 2048
    prefix: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.every > MOST_QUERIES:
            raise ValueError(f"every={self.every} is not a number of queries from 1 to {MOST_QUERIES}")
        if self.chunk < 1:
            raise ValueError(f"chunk={self.chunk} must be 1 or more")
        if self.prefix is not None and self.prefix < 1:
            raise ValueError(f"prefix={self.prefix} must be 1 or more")

    @property
    def queries(self) -> CachePolicy:
        return Nearest(window=self.every + 1)

    def in_blocks(self) -> tuple[str, ...]:
        return ("budget",) if self.budget is not None else ()

    def cut_problem(self, block_size: int) -> tuple[str, str] | None:
        problem, fitted = super().cut_problem(block_size), replace(self, block=block_size)
        if problem is not None or self.prefix is None or self.share == 100:
            return problem
        longer = self.prefix + 2 * block_size
        scored, kept = fitted.read_again(longer), fitted.kept(longer)
        if scored > kept:
            return None
        problem_of_prefix = f"prefix={self.prefix} drops nothing: {scored} of its rows are scored, and {kept} are kept"
        return problem_of_prefix, f"give prefix={fitted.least_prefix()} or more, or leave it out"

    def read_again(self, prompt: int) -> int:
        """Number of first tokens that are read again. They are whole blocks. Another block follows them within the
        prefix and before the prompt's last token."""
        stored = prompt - 1 if self.prefix is None else min(self.prefix, prompt - 1)
        return max(0, stored // self.block - 1) * self.block

    def least_prefix(self) -> int:
        """The shortest prefix that a cut drops rows from. share: not 100."""
        # Begins at the rows that stay in any case; the result is at most a hundred blocks later.
        ends = count(self._whole(self.protected if self.budget is None else self.budget), self.block)
        return next(end for end in ends if super(KVzip, self).kept(end) < end) + self.block

    def kept(self, prompt: int) -> int:
        return super().kept(self.read_again(prompt))

    def next_cut(self, done: Progress) -> int | None:
        end = self.read_again(done.prompt)
        return None if done.dropped or end <= self.kept(done.prompt) else end

    def cut(self, done: Progress) -> Cut:
        kept = self.kept(done.prompt)
        return Cut((range(kept, self.read_again(done.prompt)),), chosen=kept, reads=self.chunk)
