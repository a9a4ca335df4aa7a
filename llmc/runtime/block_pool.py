"""The KV cache's blocks: which are free, and how many hold each of the others."""

from __future__ import annotations


class BlockPool:
    """`count` blocks numbered from 0, each with the number of its holders; one without holders is free."""

    def __init__(self, count: int) -> None:
        self._holders = [0] * count
        self._free = list(range(count - 1, -1, -1))

    @property
    def count(self) -> int:
        """All blocks."""
        return len(self._holders)

    @property
    def free(self) -> int:
        """Blocks that can be allocated."""
        return len(self._free)

    def holders(self, block: int) -> int:
        """How many hold the block."""
        return self._holders[block]

    def allocate(self, count: int) -> list[int]:
        """Take free blocks, one holder each; `count` must be at most `free`."""
        if count > len(self._free):
            raise ValueError(f"{count} blocks asked for, {len(self._free)} are free")
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._holders[block] = 1
        return blocks

    def share(self, blocks: list[int]) -> None:
        """One more holder for each of these blocks, which must have one already."""
        for block in blocks:
            if not self._holders[block]:
                raise ValueError(f"block {block} is free and cannot be shared")
            self._holders[block] += 1

    def release(self, blocks: list[int]) -> None:
        """One holder fewer for each; the last one's leaving frees the block, the last block of the list first."""
        for block in reversed(blocks):
            if not self._holders[block]:
                raise ValueError(f"block {block} is free already")
            self._holders[block] -= 1
            if not self._holders[block]:
                self._free.append(block)
