"""KV compression by the last use of blocks (docs/kv-compression.md)."""

from dataclasses import dataclass
from typing import ClassVar

from llmc.program.updated_compression import Updated


@dataclass(frozen=True)
class Lru(Updated):
    """Keeps the blocks that were used last, in each layer and KV head.

    The queries of an update use a block if they pay it at least its share of their attention, which is its share of the
    rows. New blocks count as used. Among blocks that were last used in the same update, more attention wins.
    """

    NAME: ClassVar[str] = "lru"

    def in_blocks(self) -> tuple[str, ...]:
        return (*super().in_blocks(), "recent", "sinks")
