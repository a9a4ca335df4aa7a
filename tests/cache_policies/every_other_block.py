"""A cache policy from outside that drops rows: a full table loses every other one of its old blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from llmc.program import CachePolicy


@dataclass(frozen=True)
class EveryOtherBlock(CachePolicy):
    """A table of `full` blocks of `block` rows loses every second block but the last `recent` ones."""

    NAME: ClassVar[str] = "every_other_block"
    block: int
    full: int
    recent: int

    @property
    def fills_at(self) -> int:
        return self.block * self.full

    def leaving(self) -> Sequence[range]:
        return [range(i * self.block, (i + 1) * self.block) for i in range(1, self.full - self.recent, 2)]
