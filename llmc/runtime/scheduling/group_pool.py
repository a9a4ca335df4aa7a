"""The blocks of a group of layers that do not keep everything, and which of them other requests may begin behind."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from llmc.program import CachePolicy, Limits, Program
from llmc.runtime.engine_stats import GroupStats
from llmc.runtime.requests.request import Request
from llmc.runtime.requests.request_state import GroupTable
from llmc.runtime.scheduling.block_pool import BlockPool


class GroupPool:
    """One group's pool of `count` blocks, which asks the group's policy what to hold.

    A full block keeps as its content the block of group 0 with the same tokens: who finds that one finds both. So this
    pool knows no digests, and it forgets what the prefix cache forgets.

    Args:
        policy: what the group's caches keep of a sequence.
        count: number of blocks.
        slack: number of rows before those that a token sees that a step may read.
    """

    def __init__(self, policy: CachePolicy, count: int, limits: Limits, slack: int = 0) -> None:
        self.pool = BlockPool(count)
        self.pool.tell_losses(self._lose)
        self._policy, self._visible, self._fills_at = policy, policy.visible, policy.fills_at
        self._slack, self._size, self._longest = slack, limits.block_size, limits.max_model_len
        self.most = policy.sequence_blocks(limits, limits.max_batch_tokens + slack)
        self._pinned = limits.blocks_for(self._visible.pinned)
        # By block of group 0.
        self._kept: dict[int, int] = {}
        self._on_loss: Callable[[Sequence[int], Sequence[int]], None] | None = None

    @property
    def stats(self) -> GroupStats:
        """Its blocks at this moment."""
        return GroupStats(str(self._policy), self.pool.count, self.pool.used, self.pool.cached)

    def tell_losses(self, listener: Callable[[Sequence[int], Sequence[int]], None]) -> None:
        """Call the listener with kept blocks, and those of group 0 with the same tokens, when the pool gives the former
        away."""
        self._on_loss = listener

    def held(self, table: GroupTable) -> list[int]:
        """The blocks of a table that were not freed."""
        return [table.blocks[place] for place in self.held_places(table, len(table.blocks))]

    def held_places(self, table: GroupTable, end: int) -> list[int]:
        """Where these stand among the table's first `end`."""
        return [*range(min(self._pinned, end)), *range(max(self._pinned, table.first), end)]

    def kept(self, block: int) -> int | None:
        """The block with the same tokens as this one of group 0; None if there is none."""
        return self._kept.get(block)

    def admit(self, block: int, own: int) -> None:
        """A held block has the same tokens as this one of group 0."""
        self._kept[block] = own
        self.pool.keep((own,), block)

    def until_cut(self, computed: int, dropped: int) -> int:
        """Number of tokens that may follow `computed` tokens, `dropped` of which have no row, before the next cut."""
        return self._longest if self._fills_at is None else self._fills_at + dropped - computed

    def lacking(
        self, found: Sequence[int], end: int, elsewhere: Callable[[int], bool] = lambda place: False
    ) -> int | None:
        """The last place in the first `end` whose block the next token sees and this pool lacks; None if it has all.

        A table that was cut is not offered to others, so places from the last one before the first cut on count as
        lacking.

        Args:
            found: blocks of group 0, of the first places.
            elsewhere: whether a place that the pool lacks is available elsewhere.
        """
        until_cut = self.until_cut(end * self._size, 0)
        if until_cut <= 0:
            return end - 1 + until_cut // self._size
        return next((place for place in reversed(self.absent(found, end)) if not elsewhere(place)), None)

    def absent(self, found: Sequence[int], end: int) -> list[int]:
        """The places in the first `end` whose blocks the next token sees and this pool has not."""
        known = len(found)
        return [place for place in self.places(end) if place >= known or found[place] not in self._kept]

    def places(self, end: int) -> list[int]:
        """The places of the first `end` blocks of a sequence whose rows the token behind them sees."""
        return [*range(min(self._pinned, end)), *range(self._first(end * self._size), end)]

    def revived(self, found: Sequence[int]) -> int:
        """Number of this group's blocks for these blocks of group 0 that have no holder."""
        return sum(not self.pool.holders(self._kept[found[place]]) for place in self.places(len(found)))

    def start(self, found: Sequence[int]) -> GroupTable:
        """The table of a request that begins behind these blocks of group 0; the pool must lack none."""
        places, blocks = self.places(len(found)), [0] * len(found)
        for place in places:
            blocks[place] = self._kept[found[place]]
        self.pool.share([blocks[place] for place in places])
        return GroupTable(blocks, self._first(len(found) * self._size))

    def must_return(self, table: GroupTable) -> bool:
        """Whether what the table holds cannot be computed again."""
        return table.dropped > 0 and not self._policy.recomputes

    def retire(self, request: Request, table: GroupTable) -> None:
        """Give back the blocks that no later token of the request sees."""
        first = self._first(request.computed - table.dropped)
        if first > table.first:
            self.keep(request, table, request.prefix.registered, first)
            # The next request parts from others where this one did, sooner than anywhere else.
            end = min(first, max(table.first, request.prefix.common))
            begin = min(end, max(table.first, self._first(request.prefix.common * self._size)))
            self.pool.release(table.blocks[table.first : begin], least=True)
            self.pool.release(table.blocks[begin:end])
            self.pool.release(table.blocks[end:first], least=True)
            table.first = first

    def cut(self, request: Request, table: GroupTable) -> bool:
        """Drop what leaves a full table. Returns whether it was full."""
        if self.until_cut(request.computed, table.dropped) > 0:
            return False
        self.keep(request, table, request.prefix.registered, request.computed // self._size)
        for rows in reversed(self._policy.leaving()):
            places = slice(rows.start // self._size, rows.stop // self._size)
            self.pool.release(table.blocks[places], least=True)
            del table.blocks[places]
            table.dropped += len(rows)
        return True

    def keep(self, request: Request, table: GroupTable, begin: int, end: int) -> None:
        """Let others find the request's full blocks from `begin` to before `end`, by those of group 0."""
        if request.salt is None or table.dropped:
            return
        for place in (*range(begin, min(end, self._pinned)), *range(max(begin, table.first), end)):
            block, own = request.standing.blocks[place], table.blocks[place]
            if block not in self._kept:
                self.admit(block, own)

    def move(self, block: int, other: int) -> None:
        """Two blocks of group 0 hold the same tokens, and only the other one will be found from now on."""
        own = self._kept.pop(block, None)
        if own is None:
            return
        if other in self._kept:
            self.pool.forget(own)
        else:
            self._kept[other] = own
            self.pool.rename(own, other)

    def drop(self, blocks: Iterable[int]) -> None:
        """These blocks of group 0 will not be found any more."""
        for block in blocks:
            own = self._kept.pop(block, None)
            if own is not None:
                self.pool.forget(own)

    def _first(self, row: int) -> int:
        """The first block behind the pinned ones that a token in this row, or in a later one, sees."""
        return max(self._pinned, self._visible.first(max(0, row - self._slack)) // self._size)

    def _lose(self, blocks: Sequence[int], contents: Sequence[object]) -> None:
        firsts = [block for block in contents if isinstance(block, int)]
        if self._on_loss is not None:
            self._on_loss(blocks, firsts)
        for block in firsts:
            del self._kept[block]


def group_pools(program: Program, blocks: int, slack: int = 0) -> tuple[GroupPool, ...]:
    """The pools of a program's groups of caches behind group 0, which has `blocks` blocks."""
    _, *counts = program.group_blocks(blocks)
    return tuple(
        GroupPool(policy, count, program.limits, slack) for policy, count in zip(program.policies, counts, strict=True)
    )


def usable(groups: Sequence[GroupPool], found: Sequence[int]) -> int:
    """The number of found blocks that a request can begin behind."""
    return usable_with(groups, found, len(found), lambda group, place: False)


def usable_with(
    groups: Sequence[GroupPool], found: Sequence[int], end: int, elsewhere: Callable[[int, int], bool]
) -> int:
    """The number of places, at most `end`, that a request can begin behind.

    Args:
        found: blocks of group 0, of the first places.
        elsewhere: whether a group's block, (group, place), that its pool lacks can be had all the same.
    """
    while end:
        lacking = [
            place
            for number, group in enumerate(groups, 1)
            if (place := group.lacking(found, end, partial(elsewhere, number))) is not None
        ]
        if not lacking:
            break
        end = min(lacking)
    return end
