"""Blocks between caches and the second tier."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llmc.runtime.executors.executor import BlockCaches
from llmc.runtime.kv_tier.block_store import BlockKey
from llmc.runtime.kv_tier.tier import Fetch, Tier
from llmc.runtime.memory import Bytes


@dataclass(frozen=True)
class BlockOffload:
    """All that leaves is copied between two steps, before its pool gives the block to another holder; all that comes
    is written between two steps."""

    tier: Tier
    caches: BlockCaches

    def keep(self, group: int, blocks: Sequence[int], digests: Sequence[object]) -> None:
        """The pool of a group of caches gives these blocks away. Blocks with a digest go to the tier, unless it
        has them already."""
        wanted: dict[BlockKey, int] = {}
        for block, digest in zip(blocks, digests, strict=True):
            if isinstance(digest, bytes) and self.tier.wants(key := BlockKey(group, digest)):
                wanted[key] = block
        if wanted:
            copied = self.caches.read_blocks([*wanted.values()], group)
            for row, key in enumerate(wanted):
                self.tier.put(key, _row(copied, row))

    def save(self, group: int, blocks: Sequence[int], keys: Sequence[BlockKey]) -> bool:
        """Copy blocks that a request relies on. Returns False, and keeps none of them, if they do not all fit."""
        copied = self.caches.read_blocks(blocks, group) if blocks else None
        for row, key in enumerate(keys):
            assert copied is not None
            if not self.tier.put(key, _row(copied, row), pinned=True):
                self.tier.drop(keys[:row])
                return False
        return True

    def fill(self, group: int, blocks: Sequence[int], contents: Sequence[Bytes]) -> None:
        """Write what came from the tier into blocks that hold nothing yet."""
        if blocks:
            self.caches.write_blocks(blocks, contents, group)

    def fetch(self, keys: Sequence[BlockKey]) -> Fetch:
        """Begin to read blocks; the result tells when they are there."""
        return self.tier.fetch(keys)


def _row(copied: Callable[[], Bytes], row: int) -> Callable[[], Bytes]:
    def content() -> Bytes:
        octets: Bytes = copied()[row]
        return octets

    return content
