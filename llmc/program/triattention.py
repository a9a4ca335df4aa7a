"""KV compression by the attention that later queries are expected to pay (docs/kv-compression.md)."""

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from llmc.program.cache_policy import Cut, Progress
from llmc.program.scored_compression import Scored


class ChoosingHeads(StrEnum):
    """The heads that choose rows together, and keep the same ones."""

    ALL = "all"
    KV_HEAD = "kv_head"
    LAYER_KV_HEAD = "layer_kv_head"


@dataclass(frozen=True)
class TriAttention(Scored):
    """A row's score is the attention that queries like those of a calibration text would pay to it from here on.

    It acts while an answer grows: at the multiples of `every` tokens, from the end of the prompt on, once the table has
    more rows than are to stay. Scores need no queries of the request.
    Source: Mao et al. 2026, "TriAttention: Efficient long reasoning with trigonometric KV compression".

    Args:
        recent: Number of last rows that are kept whatever their scores.
        pinned: 1: all rows of the prompt stay, in addition to the budget. 0: the budget counts them, and they leave as
            others do.
        heads: The heads that choose rows together. all: those of all layers, by a row's largest score. kv_head: the
            query heads of one KV head of all layers, by the mean over layers of the largest score in each.
            layer_kv_head: the query heads of one KV head of one layer, by the largest score.
    """

    NAME: ClassVar[str] = "triattention"
    BUILT: ClassVar[tuple[str, ...]] = ("sinks", "recent", "heads")
    NEEDS_TEXT: ClassVar[bool] = True
    recent: int = 0
    pinned: int = 1
    heads: ChoosingHeads = ChoosingHeads.LAYER_KV_HEAD

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pinned not in (0, 1):
            raise ValueError(f"pinned={self.pinned} is neither 0 nor 1")
        if self.pinned and self.share is not None:
            raise ValueError(
                f"share={self.share} counts rows of the prompt, all of which stay: give budget, or pinned=0"
            )

    @property
    def joins_layers(self) -> bool:
        return self.heads != ChoosingHeads.LAYER_KV_HEAD

    def kept(self, prompt: int) -> int:
        return self._whole(prompt + self.budget) if self.pinned and self.budget is not None else super().kept(prompt)

    def next_cut(self, done: Progress) -> int:
        if done.dropped:
            return done.cut_at + self.every
        least = max(done.prompt, self.kept(done.prompt) + 1)
        return -(-least // self.every) * self.every

    def cut(self, done: Progress) -> Cut:
        kept = self.kept(done.prompt)
        rows = self.next_cut(done) - done.dropped
        return Cut((range(kept, rows),), chosen=kept, pinned=done.prompt if self.pinned else 0)
