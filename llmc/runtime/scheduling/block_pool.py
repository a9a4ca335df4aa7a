"""The KV cache's blocks: their holders, free blocks, and unused blocks with cached content."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol


class BlockWatcher(Protocol):
    """An observer that stores further data in blocks with the same numbers."""

    def given(self, blocks: Sequence[int]) -> None:
        """The blocks have got a new holder and begin empty."""

    def copied(self, block: int, source: int) -> None:
        """The block, which was just given, begins as a copy of another."""


class BlockPool:
    """`count` blocks numbered from 0, each with the number of its holders.

    A block without holders is free, or cached: it keeps its content until the pool needs the block. Free blocks are
    allocated first, then the least recently released cached block, among those of least worth if there are any.
    Contents are opaque to the pool.
    """

    def __init__(self, count: int) -> None:
        self._holders = [0] * count
        self._free = list(range(count - 1, -1, -1))
        # In order of release; a hit takes a block out of the middle. A plain dict would look for its first entry past
        # all that were removed before it: ten microseconds among 50,000.
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._least: OrderedDict[int, None] = OrderedDict()
        self._contents: list[object] = [None] * count
        self._on_loss: Callable[[Sequence[int], Sequence[object]], None] | None = None
        self._watcher: BlockWatcher | None = None

    @property
    def count(self) -> int:
        """All blocks: used + cached + free."""
        return len(self._holders)

    @property
    def available(self) -> int:
        """Blocks that can be allocated: free + cached."""
        return len(self._free) + self.cached

    @property
    def used(self) -> int:
        """The number of blocks with a holder."""
        return len(self._holders) - self.available

    @property
    def cached(self) -> int:
        """The number of blocks without holders that keep a content."""
        return len(self._cached) + len(self._least)

    @property
    def free(self) -> int:
        """The number of blocks without holders and without content."""
        return len(self._free)

    def holders(self, block: int) -> int:
        """The number of holders of a block."""
        return self._holders[block]

    def content(self, block: int) -> object:
        """The content of the block; None if it has none."""
        return self._contents[block]

    def tell_losses(self, listener: Callable[[Sequence[int], Sequence[object]], None]) -> None:
        """Call the listener with cached blocks and their contents when the pool gives the blocks away."""
        self._on_loss = listener

    def watch(self, watcher: BlockWatcher) -> None:
        """Notify the watcher of changes of blocks from now on."""
        self._watcher = watcher

    def allocate(self, count: int) -> list[int]:
        """Take blocks of no content, one holder each; `count` must be at most `available`."""
        if count > self.available:
            raise ValueError(f"{count} blocks were requested, and {self.available} of {self.count} are not held")
        free, holders = self._free, self._holders
        taken = free[max(0, len(free) - count) :]
        del free[len(free) - len(taken) :]
        if len(taken) < count:
            taken += self._take_cached(count - len(taken))
        for block in taken:
            holders[block] = 1
        if self._watcher is not None:
            self._watcher.given(taken)
        return taken

    def part(self, block: int) -> int:
        """Exchange a shared block for one's own, which is to be filled as a copy of it."""
        (own,) = self.allocate(1)
        if self._watcher is not None:
            self._watcher.copied(own, block)
        self.release((block,))
        return own

    def share(self, blocks: Sequence[int]) -> None:
        """Add a holder to each of these blocks, which must be held or cached."""
        for block in blocks:
            if not self._holders[block] and not self._take(block):
                raise ValueError(f"block {block} is free and cannot be shared")
            self._holders[block] += 1

    def release(self, blocks: Sequence[int], *, least: bool = False) -> None:
        """Remove a holder from each block. A block without holders is freed or cached. least: cached blocks are evicted
        first.

        The last block of the list goes first: a prefix's end is given away before its beginning.
        """
        holders, contents, free = self._holders, self._contents, self._free
        cached = self._least if least else self._cached
        for block in reversed(blocks):
            left = holders[block] - 1
            if left < 0:
                raise ValueError(f"block {block} is free already")
            holders[block] = left
            if not left:
                if contents[block] is None:
                    free.append(block)
                else:
                    cached[block] = None

    def keep(self, blocks: Sequence[int], content: object) -> None:
        """Give held blocks a content, in place of the one that they had."""
        holders, contents = self._holders, self._contents
        for block in blocks:
            if not holders[block]:
                raise ValueError(f"block {block} is not held and gets no content")
            contents[block] = content

    def rename(self, block: int, content: object) -> None:
        """Give a block that has a content another one."""
        if self._contents[block] is None:
            raise ValueError(f"block {block} has no content")
        self._contents[block] = content

    def forget(self, block: int) -> None:
        """Note that the block's content is not needed any more."""
        self._contents[block] = None
        if self._take(block):
            self._free.append(block)

    def _take(self, block: int) -> bool:
        """Take a block out of the cached ones; returns False if it is not cached."""
        for cached in (self._cached, self._least):
            if block in cached:
                del cached[block]
                return True
        return False

    def _take_cached(self, count: int) -> list[int]:
        """Evict the blocks that are worth least, then those that were released longest ago; their contents are lost."""
        contents, least = self._contents, min(count, len(self._least))
        taken = [self._least.popitem(False)[0] for _ in range(least)]
        taken += [self._cached.popitem(False)[0] for _ in range(count - least)]
        lost = [contents[block] for block in taken]
        for block in taken:
            contents[block] = None
        if self._on_loss is not None:
            self._on_loss(taken, lost)
        return taken
