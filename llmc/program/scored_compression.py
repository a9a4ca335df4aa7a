"""Cache policies that keep the rows with the highest scores, as a rule separately for each layer and KV head.

A table is cut for the first time where the first block begins at or after the end of the prompt, which the model has
read whole by then. Later it is cut after every `every` tokens. All heads keep the same number of rows.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from llmc.program.cache_policy import CachePolicy, Cut, Progress, UnfitError
from llmc.program.compression import LARGEST_BLOCK, Compression

# The maximum number of last queries that kernels score rows by with `snapkv`, `h2o` and `lru`.
MOST_QUERIES = 128


@dataclass(frozen=True)
class Scored(Compression):
    """Keeps `budget` rows, or `share` percent of the prompt's.

    Args:
        budget: number of rows after a cut.
        share: percent of the prompt, in the place of a budget.
        every: number of tokens from one cut to the next.
        sinks: number of first rows that are kept whatever their scores.
        block: rows of a block of the cache; the engine says it.
    """

    NAME: ClassVar[str] = ""
    IN_GRAPH: ClassVar[bool] = True
    SAID: ClassVar[tuple[str, ...]] = ("block",)
    budget: int | None = None
    share: int | None = None
    every: int = LARGEST_BLOCK
    sinks: int = 0
    block: int = 16

    def __post_init__(self) -> None:
        if self.budget is None and self.share is None:
            raise UnfitError("it lacks budget or share", "add budget=NUMBER, or share=NUMBER for percent of the prompt")
        if self.budget is not None and self.share is not None:
            raise UnfitError(f"budget={self.budget} and share={self.share} contradict each other", "give one of them")
        if self.share is not None and not 0 < self.share <= 100:
            raise ValueError(f"share={self.share} is not a percentage from 1 to 100")
        if self.every < 1:
            raise ValueError(f"every={self.every} must be 1 or more")
        if self.budget is not None and self.budget <= self.protected:
            raise UnfitError(
                f"budget={self.budget} leaves no room in addition to the {self.protected} protected rows "
                f"({self.sinks} first ones, {self.protected - self.sinks} last ones)",
                f"give budget={self._whole(self.protected + 1)} or more, or protect fewer rows",
            )

    @property
    def recent(self) -> int:
        """Number of last rows that are kept whatever their scores."""
        return 0

    @property
    def protected(self) -> int:
        """Number of rows that are kept whatever their scores."""
        return self.sinks + self.recent

    @property
    def queries(self) -> CachePolicy | None:
        """The policy of the group that holds queries; None if scores need none."""
        return None

    @property
    def joins_layers(self) -> bool:
        """Whether rows are chosen by the scores of all layers together."""
        return False

    def in_blocks(self) -> tuple[str, ...]:
        return ("every", *(("budget",) if self.budget is not None else ()))

    @property
    def kept_by(self) -> str:
        return "budget" if self.share is None else "share"

    def fitted(self, block_size: int) -> "Scored":
        return replace(self, block=block_size)

    def runs(self, other: CachePolicy) -> bool:
        if not isinstance(other, type(self)):
            return super().runs(other)
        return all(getattr(self, name) == getattr(other, name) for name in self.BUILT)

    def kept(self, prompt: int) -> int:
        """Number of rows that a cut leaves of a request with such a prompt."""
        if self.budget is not None:
            return self.budget
        assert self.share is not None
        return self._whole(max(-(-prompt * self.share // 100), self.protected + 1))

    def next_cut(self, done: Progress) -> int | None:
        kept, read = self.kept(done.prompt), self._whole(done.prompt)
        if not done.dropped and read > kept:
            return read
        return kept + self.every + done.dropped

    def cut(self, done: Progress) -> Cut:
        kept, end = self.kept(done.prompt), self.next_cut(done)
        assert end is not None
        return Cut((range(kept, end - done.dropped),), chosen=kept)

    def _whole(self, rows: int) -> int:
        """The number of rows, rounded up to whole blocks."""
        return -(-rows // self.block) * self.block
