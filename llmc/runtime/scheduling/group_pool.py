"""The blocks of a group of layers that do not keep everything, and after which of them other requests may begin."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from llmc.program import CachePolicy, Compression, Cut, Limits, Nearest, Program, Progress
from llmc.runtime.engine_stats import GroupStats
from llmc.runtime.kv_tier.saved_request import SavedTable
from llmc.runtime.requests.request import Request
from llmc.runtime.requests.request_state import GroupTable
from llmc.runtime.requests.second_reading import SecondReading, longest_part, most_tokens, parts_of
from llmc.runtime.scheduling.block_pool import BlockPool
from llmc.runtime.scheduling.cut_tables import CutTables


@dataclass(frozen=True)
class DoneCut:
    """The consequences of a table that was cut.

    moves: slots of rows that move, from and to. leaving: blocks that are to go back to the pool. rows: number of rows
    that the table had. blocks: the blocks that hold them. chosen: number of these rows that are kept by score. places:
    the blocks that those rows move to. queries, pinned: see Cut.
    """

    moves: list[tuple[int, int]]
    leaving: list[int]
    rows: int
    chosen: int
    blocks: list[int]
    places: list[int]
    queries: int | None
    pinned: int


class GroupPool:
    """One group's pool of `count` blocks, which keeps the blocks that the group's policy needs.

    A full block keeps as its content the block of group 0 with the same tokens, so a hit on that block finds both. So
    this pool knows no digests, and it forgets what the prefix cache forgets. Tables that were cut are kept whole
    (cut_tables.py).

    Args:
        policy: what the group's caches keep of a sequence.
        count: number of blocks.
        slack: number of rows before those that a token sees that a step may read.
    """

    def __init__(self, policy: CachePolicy, count: int, limits: Limits, slack: int = 0) -> None:
        self.pool = BlockPool(count)
        self.pool.tell_losses(self._lose)
        self._policy, self._visible = policy, policy.visible
        self._slack, self._size, self._limits = slack, limits.block_size, limits
        self.dropped_rows = self.kept_rows = 0
        self._pinned = limits.blocks_for(self._visible.pinned)
        # By block of group 0.
        self._kept: dict[int, int] = {}
        self._cut_tables = CutTables(self.pool)
        self._on_loss: Callable[[Sequence[int], Sequence[int]], None] | None = None

    @property
    def stats(self) -> GroupStats:
        """The numbers of blocks at this moment."""
        pool = self.pool
        return GroupStats(self._policy.shown, pool.count, pool.used, pool.cached, self.kept_rows, self.dropped_rows)

    @property
    def built(self) -> CachePolicy:
        """The policy that the engine was built for."""
        return self._policy

    def policy(self, request: Request) -> CachePolicy:
        """The policy for a request's caches."""
        own = request.origin.policy
        return own if own is not None and self._policy.per_request else self._policy

    def holds(self, policy: CachePolicy) -> bool:
        """Whether it is the pool of that policy."""
        return self._policy == policy

    @property
    def window(self) -> int:
        """Number of rows that a token sees of those that are not pinned."""
        return self._visible.near or self._limits.max_model_len

    def most(self, request: Request, tokens: int) -> int:
        """The most blocks that the request holds until it has computed this many tokens."""
        policy, limits = self.policy(request), self._limits
        of_tokens = limits.blocks_for(policy.most_rows(tokens))
        return min(of_tokens, policy.sequence_blocks(limits, limits.max_batch_tokens + self._slack))

    def tell_losses(self, listener: Callable[[Sequence[int], Sequence[int]], None]) -> None:
        """Call the listener with kept blocks, and those of group 0 with the same tokens, when the pool gives the former
        away."""
        self._on_loss = listener

    def held(self, table: GroupTable) -> list[int]:
        """The blocks of a table that have not been freed."""
        return [table.blocks[place] for place in self.held_places(table, len(table.blocks))]

    def held_places(self, table: GroupTable, end: int) -> list[int]:
        """The places of these blocks among the table's first `end`."""
        return [*range(min(self._pinned, end)), *range(max(self._pinned, table.first), end)]

    def kept(self, block: int) -> int | None:
        """The block with the same tokens as this one of group 0; None if there is none."""
        return self._kept.get(block)

    def admit(self, block: int, own: int) -> None:
        """Record that a held block, `own`, has the same tokens as `block` of group 0."""
        self._kept[block] = own
        self.pool.keep((own,), block)

    def until_cut(self, request: Request, computed: int, table: GroupTable | None = None) -> int:
        """Number of tokens that may follow `computed` tokens before the next cut. table: None before the first one."""
        end, reading = self.policy(request).next_cut(_progress(request, table)), request.standing.reading
        if end is None:
            return self._limits.max_model_len
        return end - computed if reading is None else reading.next_update - computed

    def lacking(
        self,
        request: Request,
        found_blocks: Sequence[int],
        end: int,
        elsewhere: Callable[[int], bool] = lambda place: False,
    ) -> int | None:
        """The last place in the first `end` whose block the next token sees and this pool lacks; None if it has all.

        After the first cut a request begins where a table was kept (cut_tables.py), or else before the last block that
        ends before that cut.

        Args:
            found_blocks: blocks of group 0, of the first places.
            elsewhere: whether a place that the pool lacks is available elsewhere.
        """
        until_cut = self.until_cut(request, end * self._size)
        if until_cut <= 0:
            return self._after_cut(found_blocks, end, end - 1 + until_cut // self._size)
        return next((place for place in reversed(self.absent(found_blocks, end)) if not elsewhere(place)), None)

    def _after_cut(self, found_blocks: Sequence[int], end: int, before: int) -> int | None:
        """Return None if a cut table ends with the first `end` places, else the most places, up to `end`, that one ends
        with; `before` if there are none."""
        ends = (
            place + 1
            for place in range(min(end, len(found_blocks)) - 1, before, -1)
            if found_blocks[place] in self._cut_tables
        )
        last = next(ends, before)
        return None if last == end else last

    def cut_table(self, found_blocks: Sequence[int], end: int) -> GroupTable | None:
        """The cut table that ends with the first `end` places; None if there is none."""
        return self._cut_tables.at(found_blocks[end - 1]) if 0 < end <= len(found_blocks) else None

    def absent(self, found_blocks: Sequence[int], end: int) -> list[int]:
        """The places among the first `end` whose blocks the next token attends to and this pool lacks."""
        if self.cut_table(found_blocks, end) is not None:
            return []
        known = len(found_blocks)
        return [place for place in self.places(end) if place >= known or found_blocks[place] not in self._kept]

    def places(self, end: int) -> list[int]:
        """The places among a sequence's first `end` blocks that the token after them attends to."""
        return [*range(min(self._pinned, end)), *range(self._first(end * self._size), end)]

    def revived(self, found_blocks: Sequence[int]) -> int:
        """Number of this group's blocks for these blocks of group 0 that have no holder."""
        table = self.cut_table(found_blocks, len(found_blocks))
        blocks = (
            [self._kept[found_blocks[place]] for place in self.places(len(found_blocks))]
            if table is None
            else table.blocks
        )
        return sum(not self.pool.holders(block) for block in blocks)

    def start(self, found_blocks: Sequence[int]) -> GroupTable:
        """The table of a request that starts after these blocks of group 0. The pool must hold all of them."""
        table = self.cut_table(found_blocks, len(found_blocks))
        if table is not None:
            self.pool.share(table.blocks)
            return table
        places, blocks = self.places(len(found_blocks)), [0] * len(found_blocks)
        for place in places:
            blocks[place] = self._kept[found_blocks[place]]
        self.pool.share([blocks[place] for place in places])
        return GroupTable(blocks, self._first(len(found_blocks) * self._size))

    def must_return(self, request: Request, table: GroupTable) -> bool:
        """Whether the request's rows cannot be recomputed after preemption, so that they must be swapped out and
        back."""
        return table.dropped > 0 and not self.policy(request).recomputes

    def retire(self, request: Request, table: GroupTable) -> None:
        """Release the blocks that no later token of the request sees."""
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

    def is_full(self, request: Request, table: GroupTable) -> bool:
        """Whether the table has reached its next cut."""
        return self.until_cut(request, request.computed, table) <= 0

    def missing(self, request: Request, table: GroupTable) -> int:
        """Number of blocks that a full table needs to be cut: no other request holds those that rows move to."""
        written = self._written(self._cut(request, table))
        return sum(self.pool.holders(table.blocks[place]) > 1 for place in written)

    def cut(self, request: Request, table: GroupTable) -> DoneCut:
        """Drop what leaves a full table. Returns what is to be done before the next step.

        The caller gives the blocks that leave back to the pool.
        Rows move to blocks that no one else reads: where others may find a block, another one takes its place if there
        is room, or else it is forgotten. The pool must have the blocks that are missing.
        """
        computed = request.own_computed
        full = computed // self._size
        # Requests with the same prompt may need the last table that holds its end.
        if not table.dropped or full == (request.prompt_length - 1) // self._size:
            self.keep(request, table, request.prefix.registered, full)
        cut, before, leaving = self._cut(request, table), table.blocks.copy(), list[int]()
        room = self.pool.available - self.missing(request, table)
        for place in self._written(cut):
            block = before[place]
            # Before the first row leaves, keys and values stay as they are, and others find only these.
            is_found = bool(cut.leaving or table.dropped) and self.pool.content(block) is not None
            if self.pool.holders(block) > 1 or (is_found and room > 0):
                room -= self.pool.holders(block) == 1
                (table.blocks[place],) = self.pool.allocate(1)
                leaving.append(block)
            elif is_found:
                self._forget(block)
        moves = [(self._slot(before, row), self._slot(table.blocks, to)) for row, to in self._moves(cut)]
        for gone in reversed(cut.leaving):
            blocks = slice(gone.start // self._size, gone.stop // self._size)
            leaving += table.blocks[blocks]
            del table.blocks[blocks]
        table.dropped += cut.dropped
        table.cut_at = computed
        self.dropped_rows += cut.dropped
        self.kept_rows += computed - table.dropped if cut.leaving else 0
        rows = request.computed - table.dropped + cut.dropped
        places = table.blocks[: self._limits.blocks_for(cut.chosen)]
        held = before[: self._limits.blocks_for(rows)]
        return DoneCut(moves, leaving, rows, cut.chosen, held, places, cut.queries, cut.pinned)

    def keep(self, request: Request, table: GroupTable, begin: int, end: int) -> None:
        """Let others find the request's full blocks from `begin` to before `end`, by those of group 0."""
        if request.salt is None or (table.dropped and not self.policy(request).recomputes):
            return
        if table.dropped:
            last = min(end, (self.until_cut(request, 0, table) - 1) // self._size)
            places, gone = range(max(begin, table.cut_at // self._size), last), table.dropped // self._size
            self._cut_tables.add(table, {request.standing.blocks[place]: place + 1 - gone for place in places})
            return
        for place in (*range(begin, min(end, self._pinned)), *range(max(begin, table.first), end)):
            block, own = request.standing.blocks[place], table.blocks[place]
            if block not in self._kept:
                self.admit(block, own)

    def move(self, block: int, other: int) -> None:
        """Two blocks of group 0 hold the same tokens, and only the other one will be found from now on."""
        self._cut_tables.move(block, other)
        own = self._kept.pop(block, None)
        if own is None:
            return
        if other in self._kept:
            self._cut_tables.release(own)
        else:
            self._kept[other] = own
            self.pool.rename(own, other)

    def drop(self, blocks: Iterable[int]) -> None:
        """Drop the blocks that belong to these blocks of group 0, which are no longer found."""
        for block in blocks:
            self._cut_tables.drop((block,))
            own = self._kept.pop(block, None)
            if own is not None:
                self._cut_tables.release(own)

    def second_reading(self, request: Request, table: GroupTable) -> SecondReading | None:
        """The reading that the next cut of a full table needs; None if it needs none."""
        policy = self.policy(request)
        cut, end = policy.cut(_progress(request, table)), request.computed
        if not cut.reads:
            return None
        assert isinstance(policy.queries, Nearest) and policy.queries.window is not None
        instruction = request.origin.instruction
        longest = max(1, longest_part(cut.reads, end, self._limits, instruction))
        parts = parts_of(request.tokens, end, longest, instruction)
        return SecondReading(end, parts, policy.queries.window - 1)

    def read_again(self, request: Request, table: GroupTable | SavedTable | None) -> int:
        """The most tokens that the reading before the next cut will have in the request's blocks at once; 0 if that cut
        needs no reading. table: None before the first cut."""
        policy, done = self.policy(request), _progress(request, table)
        if not (isinstance(policy, Compression) and policy.READS_AGAIN):
            return 0
        end = policy.next_cut(done)
        cut = Cut(()) if end is None else policy.cut(done)
        return most_tokens(cut.reads, end, self._limits, request.origin.instruction) if end and cut.reads else 0

    def copies(self, request: Request, table: GroupTable) -> int:
        """Number of blocks that others hold too, and that a request needs for itself alone before a reading scores
        them."""
        reading = request.standing.reading
        if (reading is not None and reading.scored is not None) or not self.read_again(request, table):
            return 0
        return sum(self.pool.holders(block) > 1 for block in self.held(table))

    def _cut(self, request: Request, table: GroupTable) -> Cut:
        cut, reading = self.policy(request).cut(_progress(request, table)), request.standing.reading
        return cut if reading is None else reading.cut(cut, request.computed)

    def _written(self, cut: Cut) -> list[int]:
        """The places of the blocks that rows move to."""
        if cut.chosen:
            return list(range(cut.pinned // self._size, self._limits.blocks_for(cut.chosen)))
        return sorted({to // self._size for to in cut.destinations})

    def _moves(self, cut: Cut) -> Iterator[tuple[int, int]]:
        """The moves of a cut that no op of the graph does, with all other rows of the blocks that are written."""
        moved = {} if cut.chosen else {to: row for row, to in cut.moves}
        for place in sorted({to // self._size for to in moved}):
            for to in range(place * self._size, (place + 1) * self._size):
                yield moved.get(to, to), to

    def _forget(self, block: int) -> None:
        """Remove the block from the blocks that requests can find."""
        content = self.pool.content(block)
        if isinstance(content, int):
            del self._kept[content]
        self._cut_tables.lose((block,))
        self.pool.forget(block)

    def _slot(self, blocks: Sequence[int], row: int) -> int:
        return blocks[row // self._size] * self._size + row % self._size

    def _first(self, row: int) -> int:
        """The first block after the pinned ones that a token in this row, or in a later one, sees."""
        return max(self._pinned, self._visible.first(max(0, row - self._slack)) // self._size)

    def _lose(self, blocks: Sequence[int], contents: Sequence[object]) -> None:
        plain = {own: first for own, first in zip(blocks, contents, strict=True) if isinstance(first, int)}
        if self._on_loss is not None:
            self._on_loss([*plain], [*plain.values()])
        for first in plain.values():
            del self._kept[first]
        self._cut_tables.lose(blocks)


def _progress(request: Request, table: GroupTable | SavedTable | None) -> Progress:
    dropped, cut_at = (0, 0) if table is None else (table.dropped, table.cut_at)
    return Progress(request.prompt_length, dropped, cut_at)


def group_pools(program: Program, blocks: int, slack: int = 0) -> tuple[GroupPool, ...]:
    """The pools of a program's groups of caches after group 0, which has `blocks` blocks."""
    _, *counts = program.group_blocks(blocks)
    return tuple(
        GroupPool(policy, count, program.limits, slack) for policy, count in zip(program.policies, counts, strict=True)
    )


def usable(groups: Sequence[GroupPool], request: Request, found_blocks: Sequence[int]) -> int:
    """The number of found blocks after which a request can begin."""
    return usable_with(groups, request, found_blocks, len(found_blocks), lambda group, place: False)


def usable_with(
    groups: Sequence[GroupPool],
    request: Request,
    found_blocks: Sequence[int],
    end: int,
    elsewhere: Callable[[int, int], bool],
) -> int:
    """The number of places, at most `end`, after which a request can begin.

    Args:
        found_blocks: blocks of group 0, of the first places.
        elsewhere: whether a group's block, (group, place), that its pool lacks is available elsewhere.
    """
    while end:
        lacking = [
            place
            for number, group in enumerate(groups, 1)
            if (place := group.lacking(request, found_blocks, end, partial(elsewhere, number))) is not None
        ]
        if not lacking:
            break
        end = min(lacking)
    return end
