"""The KV cache's blocks: who holds them, which are free, and which keep a prefix that nobody uses now."""

from __future__ import annotations

from collections.abc import Sequence


class BlockPool:
    """`count` blocks numbered from 0, each with the number of its holders.

    A block without holders is free, or cached: it keeps the prefix whose digest it was registered with until the pool
    needs it for something else. Free blocks are given away first, then the cached one that was let go longest ago.
    """

    def __init__(self, count: int) -> None:
        self._holders = [0] * count
        self._free = list(range(count - 1, -1, -1))
        # In order of release; a dict because a hit takes a block out of the middle.
        self._cached: dict[int, None] = {}
        self._digests: list[bytes | None] = [None] * count
        self._blocks: dict[bytes, int] = {}

    @property
    def count(self) -> int:
        """All blocks: used + cached + free."""
        return len(self._holders)

    @property
    def available(self) -> int:
        """Blocks that can be allocated: free + cached."""
        return len(self._free) + len(self._cached)

    @property
    def used(self) -> int:
        """Blocks that someone holds."""
        return len(self._holders) - len(self._free) - len(self._cached)

    @property
    def cached(self) -> int:
        """Blocks without holders that keep a prefix."""
        return len(self._cached)

    @property
    def free(self) -> int:
        """Blocks without holders and without content."""
        return len(self._free)

    def holders(self, block: int) -> int:
        """How many hold the block."""
        return self._holders[block]

    def allocate(self, count: int) -> list[int]:
        """Take blocks of no content, one holder each; `count` must be at most `available`."""
        return [self.allocate_one() for _ in range(count)]

    def allocate_one(self) -> int:
        """Take one block; one must be available."""
        if self._free:
            block = self._free.pop()
        elif self._cached:
            block = next(iter(self._cached))
            del self._cached[block]
            self._forget(block)
        else:
            raise ValueError(f"all {self.count} blocks are held")
        self._holders[block] = 1
        return block

    def share(self, blocks: Sequence[int]) -> None:
        """One more holder for each of these blocks, which must be held or cached."""
        for block in blocks:
            if not self._holders[block]:
                if block not in self._cached:
                    raise ValueError(f"block {block} is free and cannot be shared")
                del self._cached[block]
            self._holders[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One holder fewer for each; the last one's leaving frees or caches the block.

        The last block of the list goes first: a prefix's end is given away before its beginning.
        """
        for block in reversed(blocks):
            if not self._holders[block]:
                raise ValueError(f"block {block} is free already")
            self._holders[block] -= 1
            if not self._holders[block]:
                if self._digests[block] is None:
                    self._free.append(block)
                else:
                    self._cached[block] = None

    def register(self, block: int, digest: bytes) -> None:
        """Say what a held block contains; if another block has the same content already, that one stays the answer."""
        if not self._holders[block]:
            raise ValueError(f"block {block} is free and has no content")
        if digest not in self._blocks and self._digests[block] is None:
            self._blocks[digest] = block
            self._digests[block] = digest

    def find(self, digest: bytes) -> int | None:
        """The block that has this content."""
        return self._blocks.get(digest)

    def _forget(self, block: int) -> None:
        digest = self._digests[block]
        if digest is not None:
            del self._blocks[digest]
            self._digests[block] = None
