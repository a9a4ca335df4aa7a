"""Which blocks requests have, in every group of caches: all tables of a request grow, part and end together."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from llmc.program import Limits
from llmc.runtime.kv_tier.saved_request import SavedRequest, SavedTable
from llmc.runtime.requests.request import Request
from llmc.runtime.requests.request_state import GroupTable
from llmc.runtime.requests.second_reading import SecondReading
from llmc.runtime.scheduling.block_pool import BlockPool
from llmc.runtime.scheduling.group_pool import DoneCut, GroupPool
from llmc.runtime.scheduling.step_plan import StepOutline

# Slots of rows, from and to.
Moves = list[tuple[int, int]]


@dataclass
class Cuts:
    """The consequences of the tables that are cut before a step.

    Args:
        moves: Slots of rows that move, from and to, by group. All sources are read first.
        compactions: Arguments of the ops that move rows (llmc/ops/compact_kv.py), one for each table.
        leaving: Blocks that return to their pools.
    """

    moves: dict[int, Moves] = field(default_factory=dict)
    compactions: list[list[int]] = field(default_factory=list)
    leaving: list[tuple[GroupPool, list[int]]] = field(default_factory=list)


class RequestBlocks:
    """The blocks of `pool`, which hold every token of a request, and of `groups`, which hold what policies keep."""

    def __init__(self, limits: Limits, pool: BlockPool, groups: Sequence[GroupPool] = ()) -> None:
        self._pool, self._limits = pool, limits
        self.groups = tuple(groups)

    def fit(self, count: int) -> bool:
        """Whether every pool has `count` blocks left."""
        return count <= self._pool.available and all(count <= group.pool.available for group in self.groups)

    def append(self, requests: Iterable[Request], count: int) -> None:
        """Append a block to each of the `count` requests; they must fit."""
        for request, block in zip(requests, self._pool.allocate(count), strict=True):
            request.standing.blocks.append(block)
        for index, group in enumerate(self.groups):
            for request, block in zip(requests, group.pool.allocate(count), strict=True):
                request.standing.groups[index].blocks.append(block)

    def extend(self, request: Request, count: int) -> None:
        """Append `count` blocks to a request; they must fit."""
        own = request.standing
        own.blocks += self._pool.allocate(count)
        for group, table in self._tables(request):
            table.blocks += group.pool.allocate(count)

    def shorten(self, request: Request, count: int) -> None:
        """Leave the request its first `count` blocks."""
        own = request.standing
        while len(own.blocks) > count:
            self._pool.release((own.blocks.pop(),))
            for group, table in self._tables(request):
                group.pool.release((table.blocks.pop(),))

    def retire(self, request: Request) -> None:
        """Release what no later token of the request reads. The next part of a second reading reads the rows before
        this part, so nothing is released until then."""
        for group, table in self._tables(request) if request.standing.reading is None else ():
            group.retire(request, table)

    def is_full(self, request: Request) -> bool:
        """Whether a table of the request is to be cut."""
        return any(group.is_full(request, table) for group, table in self._tables(request))

    def begin_reading(self, request: Request) -> None:
        """Let a request with a full table read again what the cut of the table needs."""
        own = request.standing
        for group, table in self._tables(request):
            if own.reading is None and group.is_full(request, table):
                own.reading = group.second_reading(request, table)

    def go_on_reading(self, request: Request) -> None:
        """Go on after scores have changed: where a part ends, its rows leave, and the next one begins."""
        own, reading = request.standing, request.standing.reading
        if reading is None:
            return
        reading.scored = own.computed
        if own.computed == reading.part_end:
            self.shorten(request, reading.end // self._limits.block_size)
            own.computed = reading.scored = reading.end
            del reading.parts[0]
            if not reading.parts:
                own.reading = None

    def can_cut(self, request: Request) -> bool:
        """Whether there is room for the rows that move where the request's full tables are cut."""
        full = ((group, table) for group, table in self._tables(request) if group.is_full(request, table))
        return all(group.missing(request, table) <= group.pool.available for group, table in full)

    def cut(self, request: Request, cuts: Cuts) -> None:
        """Cut the request's full tables; there must be room. cuts: gets what follows from that."""
        for number, (group, table) in enumerate(self._tables(request), 1):
            if group.is_full(request, table):
                done = group.cut(request, table)
                cuts.leaving.append((group, done.leaving))
                if done.moves:
                    cuts.moves.setdefault(number, []).extend(done.moves)
                if done.chosen:
                    cuts.compactions.append(self._compaction(request, group, done))

    def give_back(self, cuts: Cuts) -> None:
        """Release the blocks that left tables, after rows have moved."""
        for group, blocks in cuts.leaving:
            group.pool.release(blocks, least=True)
        cuts.leaving.clear()

    def fitting(self, request: Request, tokens: int, rows: int, found_blocks: Sequence[int] = ()) -> int:
        """Number of pending tokens that the request can compute in a step with room for `tokens` tokens and `rows` rows
        of logits, up to the next cut of one of its tables. found_blocks: see `until_cut`."""
        return request.fitting(min(tokens, self.until_cut(request, found_blocks)), rows)

    def until_cut(self, request: Request, found_blocks: Sequence[int] = ()) -> int:
        """Return the number of tokens that may follow the computed ones before one of the request's tables is cut.

        found_blocks: blocks after which a request without tables is to start.
        """
        count, tables = self._limits.max_model_len, request.standing.groups
        for index, group in enumerate(self.groups):
            table = tables[index] if tables else group.cut_table(found_blocks, len(found_blocks))
            count = min(count, group.until_cut(request, request.computed, table))
        return count

    def can_start(self, request: Request, found_blocks: Sequence[int], others: Sequence[Request]) -> bool:
        """Whether there is room for a request after the found blocks, and for the blocks that the running requests of
        `others` still need for their tokens."""
        tables = [group.cut_table(found_blocks, len(found_blocks)) for group in self.groups]
        tokens = self._most_tokens(request, tables, None)
        missing, needs = self._limits.blocks_for(tokens) - len(found_blocks), list[int]()
        for group, table in zip(self.groups, tables, strict=True):
            # A request that is read again gets blocks of its own for all of its rows.
            found = len(found_blocks) if group.read_again(request, table) else group.revived(found_blocks)
            needs.append(min(missing + found, group.most(request, tokens)))
        return self._has_room(missing + self._revived(found_blocks), needs, others)

    def can_return(
        self, request: Request, found_blocks: Sequence[int], saved: SavedRequest, others: Sequence[Request]
    ) -> bool:
        """Return the same as `can_start` for a request that was swapped out, after the first blocks that were found
        again."""
        tables = saved.tables[1:]
        tokens = self._most_tokens(request, tables, saved.reading)
        total = self._limits.blocks_for(tokens)
        growth = total - saved.blocks
        needs = [
            min(len(table.places) + growth, group.most(request, tokens))
            for group, table in zip(self.groups, tables, strict=True)
        ]
        return self._has_room(total - len(found_blocks) + self._revived(found_blocks), needs, others)

    def _has_room(self, need: int, needs: Sequence[int], others: Sequence[Request]) -> bool:
        """Whether the pools have these blocks, and what the others still need. needs: number of blocks needed in each
        group."""
        tokens = [self._most_tokens(r, r.standing.groups, r.standing.reading) for r in others]
        lacks = [
            max(0, self._limits.blocks_for(count) - len(r.standing.blocks))
            for r, count in zip(others, tokens, strict=True)
        ]
        if need + sum(lacks) > self._pool.available:
            return False
        for index, (group, own_need) in enumerate(zip(self.groups, needs, strict=True)):
            held = [len(group.held(other.standing.groups[index])) for other in others]
            promised = sum(group.copies(other, other.standing.groups[index]) for other in others)
            promised += sum(
                min(lack, max(0, group.most(other, count) - own))
                for other, count, lack, own in zip(others, tokens, lacks, held, strict=True)
            )
            if own_need + promised > group.pool.available:
                return False
        return True

    def _most_tokens(
        self, request: Request, tables: Sequence[GroupTable | SavedTable | None], reading: SecondReading | None
    ) -> int:
        """The most tokens that are in the request's blocks until it has computed those that it has: its own, or some of
        them and a part of a second reading. tables: by group; None before the first cut. reading: the one under way."""
        if reading is not None:
            return max(len(request.tokens), reading.most)
        ahead = (group.read_again(request, table) for group, table in zip(self.groups, tables, strict=True))
        return max((len(request.tokens), *ahead))

    def _revived(self, found_blocks: Sequence[int]) -> int:
        """Number of these blocks without a holder."""
        return sum(not self._pool.holders(block) for block in found_blocks) if found_blocks else 0

    def start(self, request: Request, found_blocks: Sequence[int], count: int) -> None:
        """Start the request on the found blocks, with further blocks up to `count`."""
        own = request.standing
        if found_blocks:
            self._pool.share(found_blocks)
        own.blocks = list(found_blocks)
        own.groups = tuple(group.start(found_blocks) for group in self.groups)
        self.extend(request, count - len(found_blocks))

    def must_return(self, request: Request) -> bool:
        """Whether what its blocks hold cannot be computed again."""
        return any(group.must_return(request, table) for group, table in self._tables(request))

    def saved(self, request: Request, shared: int) -> tuple[SavedTable, ...]:
        """The request's tables as far as they hold what it has computed. shared: number of blocks of the first group
        that are found again by their digests."""
        own, count = request.standing, self._limits.blocks_for(request.computed)
        tables = [SavedTable(count, tuple(range(shared, count)))]
        for group, table in self._tables(request):
            end = count - self._gone(table)
            tables.append(
                SavedTable(end, tuple(group.held_places(table, end)), table.first, table.dropped, table.cut_at)
            )
        assert all(len(own.table(number)) >= table.count for number, table in enumerate(tables))
        return tuple(tables)

    def restore(self, request: Request, found_blocks: Sequence[int], tables: Sequence[SavedTable]) -> None:
        """Restore the request's saved tables, with newly allocated blocks, and the blocks of the first group that were
        found again. There must be room."""
        self._pool.share(found_blocks)
        first, *others = tables
        own = request.standing
        own.blocks = [*found_blocks, *self._pool.allocate(len(first.places))]
        restored = []
        for group, table in zip(self.groups, others, strict=True):
            blocks = [0] * table.count
            for place, block in zip(table.places, group.pool.allocate(len(table.places)), strict=True):
                blocks[place] = block
            restored.append(GroupTable(blocks, table.first, table.dropped, table.cut_at))
        own.groups = tuple(restored)

    def fork(self, parent: Request, child: Request) -> None:
        """Let the child begin on the parent's blocks, as far as they hold what it has computed."""
        first, own = parent.standing, child.standing
        count = self._limits.blocks_for(own.computed)
        own.blocks = first.blocks[:count]
        self._pool.share(own.blocks)
        own.groups = tuple(replace(table, blocks=table.blocks[: count - self._gone(table)]) for table in first.groups)
        for group, table in self._tables(child):
            group.pool.share(group.held(table))

    def can_write(self, request: Request, index: int, end: int) -> bool:
        """Whether there is room for the request to write from its block `index` to before `end`."""
        own = request.standing
        lacks = max(0, end - len(own.blocks))
        tables = ((group.pool, table.blocks, index - self._gone(table)) for group, table in self._tables(request))
        pools = ((self._pool, own.blocks, index), *tables)
        return all(lacks + _is_shared(pool, blocks, place) <= pool.available for pool, blocks, place in pools)

    def write(self, request: Request, index: int, end: int, outline: StepOutline) -> None:
        """Make the blocks from `index` to before `end` the request's own; there must be room."""
        own = request.standing
        _part(self._pool, own.blocks, index, outline.copies)
        for number, (group, table) in enumerate(self._tables(request), 1):
            copies = outline.group_copies.setdefault(number, {})
            _part(group.pool, table.blocks, index - self._gone(table), copies)
        if end > len(own.blocks):
            self.extend(request, end - len(own.blocks))

    def release(self, request: Request) -> None:
        """Release all blocks."""
        own = request.standing
        for group, table in self._tables(request):
            group.pool.release(group.held(table))
        if own.blocks:
            self._pool.release(own.blocks)
        own.blocks, own.groups, own.reading = [], (), None

    def _tables(self, request: Request) -> Iterable[tuple[GroupPool, GroupTable]]:
        """Yield the request's tables; none for a request that holds nothing."""
        return zip(self.groups, request.standing.groups, strict=False)

    def _compaction(self, request: Request, group: GroupPool, done: DoneCut) -> list[int]:
        """The numbers of a compaction, as described in llmc/ops/compact_kv.py."""
        wanted = group.policy(request).queries
        own, slots = request.standing, list[int]()
        for number, other in enumerate(self.groups, 1):
            if wanted is not None and other.holds(wanted):
                held = other.window - 1
                count = held if done.queries is None else min(held, done.queries)
                begin = max(0, request.computed - count)
                positions = range(begin, request.computed)
                slots = [own.slot(number, position, self._limits.block_size) for position in positions]
        header = [done.rows, done.chosen, len(slots), request.own_computed, done.pinned]
        return [*header, *done.blocks, *done.places, *slots]

    def _gone(self, table: GroupTable) -> int:
        """Return the number of blocks that have left a table."""
        return table.dropped // self._limits.block_size


def _is_shared(pool: BlockPool, blocks: Sequence[int], index: int) -> bool:
    return index < len(blocks) and pool.holders(blocks[index]) > 1


def _part(pool: BlockPool, blocks: list[int], index: int, copies: dict[int, int]) -> None:
    if _is_shared(pool, blocks, index):
        own = pool.part(blocks[index])
        copies[own], blocks[index] = blocks[index], own
