"""The scheduler's part of the second tier: bring prefixes back into the pools, swap requests out and in.

All of it happens while a step is planned, when none is under way. A block that leaves is copied before its pool gives
it to another holder, and a block that comes back is written before the prefix cache knows it. A step that copies blocks
of forks brings no block back, because its copies read blocks that the pools may have given away meanwhile.

A prefix is brought for the request that starts next. It waits until the tier has read what the pools lack, while others
run. Blocks that have vanished from the tier by then, or are damaged, are computed.
"""

import struct
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from llmc.errors import UnavailableError
from llmc.runtime.engine_stats import OffloadStats
from llmc.runtime.kv_tier.block_offload import BlockOffload
from llmc.runtime.kv_tier.block_store import BlockKey
from llmc.runtime.kv_tier.saved_request import SavedRequest
from llmc.runtime.kv_tier.tier import Fetch
from llmc.runtime.memory import Bytes
from llmc.runtime.prefix_cache.prefix_cache import PrefixCache
from llmc.runtime.requests.request import Request
from llmc.runtime.scheduling.block_pool import BlockPool
from llmc.runtime.scheduling.group_pool import GroupPool, usable_with
from llmc.runtime.scheduling.request_blocks import RequestBlocks
from llmc.runtime.scheduling.step_plan import StepOutline

# After this long a store that does not answer counts as lost: what it has is computed.
PATIENCE_SECONDS = 10.0
# How often a request waits for the tier. Others may take the pools' part of its prefix meanwhile.
_MOST_FETCHES = 3
# A place in the prefix whose block is only in the tier.
_ABSENT = -1
_PRIVATE_NAME = struct.Struct("<QI")


class SecondTier:
    """Serves one scheduler, with its pools, tables and prefix cache."""

    def __init__(
        self, offload: BlockOffload, prefix_cache: PrefixCache, pool: BlockPool, blocks: RequestBlocks, block_size: int
    ) -> None:
        self._offload, self._tier = offload, offload.tier
        self._prefix_cache, self._pool, self._blocks, self._size = prefix_cache, pool, blocks, block_size
        self._saved: dict[Request, SavedRequest] = {}
        self._swaps = self._hits = 0
        self._fetch: tuple[Request, Fetch] | None = None
        self._awaited: Fetch | None = None
        self._fetches: Counter[Request] = Counter()

    @property
    def stats(self) -> OffloadStats:
        """The numbers of blocks at this moment."""
        return self._tier.stats(len(self._saved), self._hits)

    def swap_out(self, request: Request, outline: StepOutline, *, must_return: bool = False) -> bool:
        """Save the blocks of a request that is about to lose them, except those that are found by their digests.

        Args:
            outline: the step that is planned, whose copies are not done yet.
            must_return: the request cannot be computed again, so all of its blocks are saved.

        Returns:
            Whether there was room. If not, nothing is saved.
        """
        shared = 0 if must_return else min(request.prefix.registered, request.computed // self._size)
        tables = self._blocks.saved(request, shared)
        self._swaps += 1
        keys: list[tuple[BlockKey, ...]] = []
        for group, table in enumerate(tables):
            held, copies = request.standing.table(group), outline.copies_of(group)
            blocks = [copies.get(held[place], held[place]) for place in table.places]
            own = tuple(BlockKey(group, _PRIVATE_NAME.pack(self._swaps, place)) for place in table.places)
            if not self._offload.save(group, blocks, own):
                self._tier.drop([key for each in keys for key in each])
                return False
            keys.append(own)
        reading = request.standing.reading
        self._saved[request] = SavedRequest(request.computed, shared, tables, tuple(keys), must_return, reading)
        return True

    def swapped(self, request: Request) -> SavedRequest | None:
        """The record of a swapped request if all of its blocks are back; None if the request starts again."""
        saved = self._saved.get(request)
        if saved is None or not self._is_complete(request, saved):
            return None
        return saved

    def swap_in(self, request: Request) -> None:
        """Give a swapped-out request its blocks back. `swapped` must have reported them as available, and there must be
        room."""
        saved = self._saved[request]
        self._blocks.restore(request, self._prefix_cache.run(request)[: saved.shared], saved.tables)
        for group, (table, keys) in enumerate(zip(saved.tables, saved.keys, strict=True)):
            held = request.standing.table(group)
            contents = [saved.arrived[key] for key in keys]
            self._offload.fill(group, [held[place] for place in table.places], contents)
        request.standing.computed, request.standing.reading = saved.computed, saved.reading
        self._hits += saved.computed - saved.shared * self._size
        self.forget(request)

    def forget(self, request: Request) -> bool:
        """Forget a request that starts, continues or has ended. Returns whether it needed the tier to continue."""
        saved = self._saved.pop(request, None)
        if saved is not None:
            self._tier.drop(saved.all_keys)
        del self._fetches[request]
        if self._fetch is not None and self._fetch[0] is request:
            self._fetch = None
        return saved is not None and saved.must_return

    def has_arrived(self, request: Request, outline: StepOutline) -> bool:
        """Whether the request, which would start now, has in the pools what the tier can give it. It begins to read
        what is missing. There must be room for all blocks of the request."""
        if outline.has_copies:
            return False
        if self._fetch is not None and self._fetch[0] is request:
            fetch = self._fetch[1]
            if not fetch.is_done:
                return False
            self._fetch = None
            self._take_in(request, fetch.found)
        if self._fetches[request] == _MOST_FETCHES:
            return True
        wanted = self._wanted(request)
        if not wanted:
            return True
        self._fetch = request, self._offload.tier.fetch(wanted)
        self._fetches[request] += 1
        return False

    def wait(self) -> bool:
        """Wait for the blocks that are being read, if no step can be made. Returns True once per fetch."""
        if self._fetch is None or self._fetch[1] is self._awaited:
            return False
        request, fetch = self._fetch
        self._awaited = fetch
        if not fetch.wait(PATIENCE_SECONDS):
            self._fetch = None
            self._fetches[request] = _MOST_FETCHES
        return True

    def _wanted(self, request: Request) -> list[BlockKey]:
        """The keys of blocks that the tier has and the request lacks.

        They are all blocks of a swapped request if the tier has all, else the prefix of a request that starts again.
        """
        saved = self._saved.get(request)
        if saved is not None:
            prefix = self._reach(request, saved.shared, self._tier.holds)
            wanted = [self._key(request, place) for place, block in enumerate(prefix) if block == _ABSENT]
            wanted += [key for key in saved.all_keys if key not in saved.arrived]
            if len(prefix) == saved.shared and all(self._tier.holds(key) for key in wanted):
                return wanted
        prefix = self._reach(request, _most_blocks(request, self._size), self._tier.holds)
        groups, known = self._blocks.groups, self._prefix_cache.run(request)

        def is_held(group: int, place: int) -> bool:
            return self._tier.holds(self._key(request, place, group))

        end = usable_with(groups, request, prefix, len(prefix), is_held)
        if end <= usable_with(groups, request, known, len(known), lambda group, place: False):
            return []
        wanted = [self._key(request, place) for place in range(end) if prefix[place] == _ABSENT]
        for number, group in enumerate(groups, 1):
            wanted += [self._key(request, place, number) for place in group.absent(prefix, end)]
        return wanted

    def _take_in(self, request: Request, found: Mapping[BlockKey, Bytes]) -> None:
        """Put the blocks that were read into the pools, where requests find them, or into the record of the swapped
        request."""
        saved = self._saved.get(request)
        if saved is not None:
            saved.arrived.update({key: found[key] for key in saved.all_keys if key in found})
        prefix = self._reach(request, _most_blocks(request, self._size), lambda key: key in found)
        # Blocks in the pool must not give way to the blocks that come.
        known = [block for block in prefix if block != _ABSENT]
        self._pool.share(known)
        places = [place for place, block in enumerate(prefix) if block == _ABSENT][: self._pool.available]
        keys, blocks = [self._key(request, place) for place in places], self._pool.allocate(len(places))
        self._offload.fill(0, blocks, [found[key] for key in keys])
        for place, key, block in zip(places, keys, blocks, strict=True):
            self._prefix_cache.admit(block, key.name)
            prefix[place] = block
        self._hits += len(places) * self._size
        for number, group in enumerate(self._blocks.groups, 1):
            self._take_in_group(request, number, group, prefix, found)
        self._pool.release([block for block in prefix if block != _ABSENT])

    def _take_in_group(
        self, request: Request, number: int, group: GroupPool, prefix: Sequence[int], found: Mapping[BlockKey, Bytes]
    ) -> None:
        """The same of another group, whose blocks are found by those of the first."""
        kept = [own for block in prefix if (own := group.kept(block)) is not None]
        group.pool.share(kept)
        coming = [
            (block, key)
            for place, block in enumerate(prefix)
            if block != _ABSENT and group.kept(block) is None and (key := self._key(request, place, number)) in found
        ][: group.pool.available]
        blocks = group.pool.allocate(len(coming))
        self._offload.fill(number, blocks, [found[key] for _, key in coming])
        for (block, _), own in zip(coming, blocks, strict=True):
            group.admit(block, own)
        group.pool.release([*kept, *blocks])

    def _is_complete(self, request: Request, saved: SavedRequest) -> bool:
        has_rest = all(key in saved.arrived for key in saved.all_keys)
        return has_rest and len(self._prefix_cache.run(request)) >= saved.shared

    def _reach(self, request: Request, most: int, comes: Callable[[BlockKey], bool]) -> list[int]:
        """The first blocks of the request, at most `most`, up to the first one that is neither in the pool nor
        `comes`; _ABSENT stands for a block that comes."""
        found: list[int] = []
        for place in range(most):
            key = self._key(request, place)
            block = self._prefix_cache.find(key.name)
            if block is None and not comes(key):
                break
            found.append(_ABSENT if block is None else block)
        return found

    def _key(self, request: Request, place: int, group: int = 0) -> BlockKey:
        return BlockKey(group, self._prefix_cache.digest(request, place))


def _most_blocks(request: Request, size: int) -> int:
    """Return the maximum number of blocks that the request may find: its last token is always computed, and so are the
    tokens whose logits it needs."""
    if request.salt is None or request.scored < request.scored_end:
        return 0
    return (len(request.tokens) - 1) // size


def blocks_lost() -> UnavailableError:
    """The error of a request that cannot be computed again."""
    return UnavailableError(
        "the request had to give back blocks that cannot be computed again, and the second tier had no room for them, "
        "or has lost them",
        fix="load with a larger kv_cache_bytes, or with a kv_offloading_size that has room for more requests",
    )
