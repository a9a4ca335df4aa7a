"""KV compression by stride: every n-th old position stays (docs/kv-compression.md)."""

from dataclasses import dataclass
from typing import ClassVar

from llmc.program.cache_policy import Cut, Progress, UnfitError
from llmc.program.compression import LARGEST_BLOCK, Compression


@dataclass(frozen=True)
class Stride(Compression):
    """Keeps every `step`-th old position, the first `sinks` and the last `recent`.

    Args:
        step: one of each `step` old positions is kept.
        recent: number of positions before a cut that stay exact.
        sinks: number of positions at the beginning that stay exact.
        rows: number of rows that a cut leaves of step·rows old positions.
    """

    NAME: ClassVar[str] = "stride"
    step: int
    recent: int
    sinks: int = 0
    rows: int = LARGEST_BLOCK

    def __post_init__(self) -> None:
        if self.step < 2:
            raise UnfitError(f"step={self.step} drops nothing", "give step=2 or more, or kv_compression=none")
        if not self.recent or not self.rows:
            raise ValueError(f"recent={self.recent} and rows={self.rows} must be 1 or more")

    def in_blocks(self) -> tuple[str, ...]:
        return ("recent", "sinks", "rows")

    @property
    def kept_by(self) -> str:
        return "step, recent or rows"

    def next_cut(self, done: Progress) -> int:
        return self.sinks + self.recent + self.step * self.rows * (1 + self._cuts(done.dropped))

    def cut(self, done: Progress) -> Cut:
        first = self.sinks + self.rows * self._cuts(done.dropped)
        end, whole = first + self.rows, first + self.step * self.rows
        return Cut((range(end, whole),), range(first + self.step, whole, self.step), range(first + 1, end))

    def most_rows(self, tokens: int) -> int:
        exact = self.sinks + self.recent + self.step * self.rows
        return min(tokens, exact + self.rows * max(0, -(-(tokens - exact) // (self.step * self.rows))))

    def _cuts(self, dropped: int) -> int:
        return dropped // ((self.step - 1) * self.rows)
