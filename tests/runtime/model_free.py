"""Requests and an executor without a model, for the scheduler's tests: a cell of the cache holds what it was given.

A request's next token is a checksum of all cells before it, so a block that is shared wrongly, copied wrongly or
written by two changes what it says. One that breaks at a position writes NaN there, and gets NaN from then on.

Layers that do not keep everything have cells of their own: what a token sees of them must be what the others hold.

With states a slot of them holds what a sequence has read, and a step that finds there another's, or the same sequence's
at another place, is an error.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from llmc.errors import ModelFailureError, RequestError
from llmc.program import COMPACTION_HEADER, TREE_REACH, CachePolicy, Limits, Streaming
from llmc.runtime.kv_tier.block_offload import BlockOffload
from llmc.runtime.kv_tier.block_store import BlockKey
from llmc.runtime.kv_tier.host_blocks import HostBlocks
from llmc.runtime.kv_tier.tier import Fetch, Tier
from llmc.runtime.loop.publish import publish
from llmc.runtime.loop.step import Ints, Step
from llmc.runtime.loop.step_inputs import StepInputs
from llmc.runtime.memory import Bytes
from llmc.runtime.prefix_cache.chain import Chain
from llmc.runtime.prefix_cache.state_snapshots import StateSnapshots
from llmc.runtime.requests.generation_request import Priority
from llmc.runtime.requests.request import Forks, Origin, Request, SampledRequest
from llmc.runtime.sampling.sampler import Sampler
from llmc.runtime.sampling.sampling_params import SamplingParams
from llmc.runtime.scheduling.block_pool import BlockPool
from llmc.runtime.scheduling.cut_tables import _OF_CUT_TABLES
from llmc.runtime.scheduling.group_pool import GroupPool
from llmc.runtime.scheduling.request_blocks import Cuts
from llmc.runtime.scheduling.scheduler import Scheduler
from llmc.runtime.scheduling.step_plan import Chunk, StepPlan
from llmc.runtime.speculation.speculation import Speculation

NAN = -1000
PROMPT = [(7 * i + 3) % 97 for i in range(64)]


def next_token(tokens: Sequence[int]) -> int:
    """What the pretended model says after these tokens."""
    return (sum((i + 1) * token for i, token in enumerate(tokens)) + len(tokens)) % 97


def logit_after(cells: Sequence[int]) -> float:
    """The row of logits after these cells: the next token."""
    return float("nan") if NAN in cells else next_token(cells)


def no_logits() -> ModelFailureError:
    return ModelFailureError("the pretended model gave NaN")


def continuation(prompt: Sequence[int], count: int, variant: int = 0) -> list[int]:
    """The next `count` tokens; the first is moved by `variant`, so that choices differ."""
    tokens = [*prompt, (next_token(prompt) + variant) % 97]
    while len(tokens) < len(prompt) + count:
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class Counted(SampledRequest):
    """Takes tokens until it has `output` of them; a scoring request takes none.

    forks: how many others start with it when the prompt is computed, with a first token each from the same logits. Only
    `variant` distinguishes them.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        output: int,
        *,
        every_logit: bool = False,
        forks: int = 0,
        variant: int = 0,
        priority: Priority = Priority.FREE,
        salt: bytes | None = None,
        arrived: float | None = None,
        deadline: float | None = None,
    ) -> None:
        super().__init__(
            prompt,
            Sampler(SamplingParams(), np.array(prompt), 97, np.zeros(0, np.int64)),
            every_logit=every_logit,
            origin=Origin(priority, salt, arrived, deadline),
        )
        self.is_steady = not every_logit and not forks and output > 0
        self.prompt = list(prompt)
        self.prompt_tokens = len(self.prompt)
        self.output = 0 if every_logit else output
        self.most = len(self.prompt) + self.output
        self.variant = variant
        self.rows = 0
        self.children = [
            Counted(prompt, output, variant=i + 1, priority=priority, salt=salt, arrived=arrived) for i in range(forks)
        ]
        self._unstarted = list(self.children)

    def accept(self, token: int, logits: npt.NDArray[np.float32] | None) -> None:
        """One more; the first one is moved."""
        is_first = len(self.tokens) == len(self.prompt)
        self.tokens.append((token + (self.variant if is_first else 0)) % 97)
        if len(self.tokens) - len(self.prompt) == self.output:
            self.end()

    def receive(self, start: int, logits: npt.NDArray[np.float32]) -> None:
        """`logits` has the next token in its one column."""
        self.rows = max(self.rows, start + len(logits))
        if np.isnan(logits).any():
            raise no_logits()
        if not self.output:
            if self.rows == len(self.tokens):
                self.end()
            return
        for choice in (self, *self._unstarted):
            choice.accept(int(logits[-1, 0]), None)
        self.is_steady = True

    def fail(self, error: RequestError) -> None:
        """The others have not started, or fail for themselves."""
        super().fail(error)
        for child in self._unstarted:
            child.fail(error)

    def follow(self, forks: Forks) -> None:
        """Start the others."""
        for child in self._unstarted:
            if not child.finished:
                forks.fork(self, child)
        self._unstarted = []

    def expected(self) -> list[int]:
        """All tokens that it must have when it is finished."""
        return [*self.prompt, *(continuation(self.prompt, self.output, self.variant) if self.output else [])]


@dataclass(frozen=True)
class Checksums:
    """A step's rows of logits, which are the next tokens themselves: [rows, 1]."""

    rows: npt.NDArray[np.float32]

    def logits(self, first: int, count: int) -> npt.NDArray[np.float32]:
        return self.rows[first : first + count]

    def tokens(self, samplers: Sequence[Sampler], rows: Sequence[int]) -> list[int | RequestError]:
        assert len(samplers) == len(rows) and list(rows) == sorted(rows)
        tokens = [float(self.rows[row, 0]) for row in rows]
        return [no_logits() if math.isnan(token) else int(token) for token in tokens]

    def guesses(self, first: int, count: int) -> list[int]:
        return [int(token) for token in self.rows[first : first + count, 0]]


class Run:
    """A scheduler with a pool and a pretended cache, stepped and checked.

    requests: all that ever were. breaks_at: the position whose token makes NaN when that request computes it.
    speculation: what drafts, if anything. snapshots: how many of states, of a model that has some; spacing: theirs.
    policies: of layers that do not keep everything, whose pools have `spare` blocks more than one sequence needs.
    tier_blocks: how many blocks a second tier holds, if there is one.
    """

    def __init__(
        self,
        limits: Limits,
        blocks: int,
        max_step_tokens: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        speculation: Speculation | None = None,
        snapshots: int | None = None,
        spacing: int = 1,
        policies: Sequence[CachePolicy] = (),
        spare: int = 0,
        tier_blocks: int | None = None,
    ) -> None:
        self.speculation = speculation
        self.limits = limits
        self.pool = BlockPool(blocks)
        if speculation is not None:
            speculation.watch(self.pool)
        self.inputs = StepInputs(limits, groups=1 + len(policies))
        self.slack = 0 if speculation is None else TREE_REACH
        self.policies = policies
        most = limits.max_batch_tokens + self.slack
        counts = [policy.sequence_blocks(limits, most) + spare for policy in policies]
        self.groups = [
            GroupPool(policy, count, limits, self.slack) for policy, count in zip(policies, counts, strict=True)
        ]
        self.group_cells = [np.full((count, limits.block_size), -1, np.int64) for count in counts]
        self.states: dict[int, list[int]] = {}
        self.snapshots: StateSnapshots | None = None
        if snapshots is not None:
            slots = range(limits.max_sequences, limits.max_sequences + snapshots)
            self.snapshots = StateSnapshots(slots, self._copy_states, limits.block_size, spacing)
        self.cells = np.full((blocks, limits.block_size), -1, np.int64)
        self.reading = LateReads()
        self.tier: Tier | None = None
        if tier_blocks is not None:
            sizes = [8 * limits.block_size] * (1 + len(policies))
            most = tier_blocks * (sizes[0] + HostBlocks.overhead)
            self.tier = AwaitedReads(self.reading, most, sizes)
        self.scheduler = Scheduler(
            limits,
            self.pool,
            max_step_tokens,
            clock=clock,
            speculation=speculation,
            snapshots=self.snapshots,
            groups=self.groups,
            move_rows=self._move_rows,
            offload=None if self.tier is None else BlockOffload(self.tier, CellCaches(self.cells, *self.group_cells)),
        )
        self.requests: list[Request] = []
        self.breaks_at: dict[Request, int] = {}
        self.steps = 0

    def add(self, request: Counted) -> None:
        self.requests += [request, *request.children]
        self.scheduler.add(request)

    def finish(self) -> None:
        """Step until nothing is left."""
        while not self.scheduler.idle:
            self.step()

    def step(self) -> tuple[Chunk, ...]:
        """One step; checks everything that must hold before and after it."""
        self.reading.go_on()
        plan = self.scheduler.schedule()
        chunks = (*(Chunk(request, request.computed, 1, 1) for request in plan.decodes), *plan.chunks)
        self._check_plan(plan, chunks)
        self.check_accounts([chunk.request for chunk in chunks if chunk.request.error is not None])
        if plan.copies:
            self.cells[list(plan.copies)] = self.cells[list(plan.copies.values())]
        for group, copies in plan.group_copies.items():
            cells = self.group_cells[group - 1]
            cells[list(copies)] = cells[list(copies.values())]
        if chunks:
            step = self.inputs.fill(plan)
            self._check_inputs(step, chunks)
            self.cells.reshape(-1)[step.slot_mapping] = step.input_ids
            for cells, slots in zip(
                self.group_cells, [] if step.group_slots is None else step.group_slots, strict=True
            ):
                cells.reshape(-1)[slots] = step.input_ids
            self._break(chunks)
            self._check_groups(step, chunks)
            self._carry(chunks)
            rows = [logit_after(tokens) for tokens in self._seen(step, chunks)]
            results = Checksums(np.array(rows, np.float32).reshape(-1, 1))
            self.inputs.advance(publish(plan, results, self.scheduler, self._move_slots))
            if self.speculation is not None:
                self.speculation.observe(plan)
            self.scheduler.drop_failed()
        self.check_accounts()
        self.steps += 1
        return chunks

    def check_accounts(self, failing: Sequence[Request] = ()) -> None:
        """used + cached + free = all, and every holder is a request that has the block in its list.

        failing: requests that have failed while a step was planned, and end with it.
        """
        held = [block for request in self.requests for block in request.standing.blocks]
        assert [held.count(block) for block in range(self.pool.count)] == [
            self.pool.holders(block) for block in range(self.pool.count)
        ]
        assert self.pool.used + self.pool.cached + self.pool.free == self.pool.count
        assert sum(request.standing.is_seated for request in self.requests) <= self.limits.max_sequences
        places = sorted(request.decoding.place for request in self.requests if request.decoding.place is not None)
        assert places == list(range(len(places))), "the decoding requests' places have gaps"
        assert all(request.standing.is_seated for request in self.requests if request.decoding.place is not None)
        ended = [request for request in self.requests if request.finished and request not in failing]
        assert not any(request.standing.blocks for request in ended), "a finished one holds some"
        chains = {c for block in range(self.pool.count) if isinstance(c := self.pool.content(block), Chain)}
        folded = [block for chain in chains for block in chain.blocks]
        assert len(folded) == len(set(folded)) and all(self.pool.content(block) in chains for block in folded)
        assert all(self.pool.holders(block) <= 1 for block in folded), "a block that is not hashed was found"
        kept = [block for block in range(self.pool.count) if self.pool.content(block) is not None]
        assert not (self.cells[kept] == NAN).any(), "others may find a block that holds NaN"
        if self.snapshots is not None:
            self._check_snapshots(self.snapshots, set(held), set(kept))
        for number, group in enumerate(self.groups):
            self._check_pool(number, group, set(held) | set(kept))

    def _check_pool(self, number: int, group: GroupPool, findable: set[int]) -> None:
        """No block is lost or held twice; what is kept goes with a block that may be found."""
        pool, cells = group.pool, self.group_cells[number]
        tables = [request.standing.groups[number] for request in self.requests if request.standing.groups]
        held = [block for table in tables for block in group.held(table)]
        assert [held.count(block) for block in range(pool.count)] == [pool.holders(b) for b in range(pool.count)]
        assert pool.used + pool.cached + pool.free == pool.count
        for request in self.requests:
            if request.standing.groups:
                table = request.standing.groups[number]
                whole = len(table.blocks) + table.dropped // self.limits.block_size
                assert whole == len(request.standing.blocks)
        contents = {pool.content(block): block for block in range(pool.count) if pool.content(block) is not None}
        of_cuts, kept = contents.pop(_OF_CUT_TABLES, None), group._cut_tables
        assert contents == group._kept and group._kept.keys() <= findable
        assert (of_cuts is None or kept._users) and kept._by_end.keys() <= findable
        assert {end for cut, _ in kept._by_end.values() for end in cut.ends} == kept._by_end.keys()
        used = {block for cut, _ in kept._by_end.values() for block in cut.blocks}
        assert used == kept._users.keys() and all(pool.content(block) is not None for block in used)
        for block, own in group._kept.items():
            assert (cells[own] == self.cells[block]).all(), "others may find a block of other tokens"

    def _check_groups(self, step: Step, chunks: tuple[Chunk, ...]) -> None:
        """What each token sees of the layers that do not keep everything, and how much of them its request holds."""
        size = self.limits.block_size
        for number, (policy, group) in enumerate(zip(self.policies, self.groups, strict=True)):
            for index, chunk in enumerate(chunks):
                assert step.group_tables is not None and step.group_lens is not None
                table, standing = step.group_tables[number, index], chunk.request.standing
                # A second reading keeps the rows before it until it ends.
                least = size if standing.reading is None else len(standing.reading.parts[0])
                most = policy.sequence_blocks(self.limits, max(chunk.tokens, least) + self.slack)
                assert len(group.held(standing.groups[number])) <= most
                held = _held(policy, chunk)
                assert step.group_lens[number, index] == len(held) <= policy.most_rows(self.limits.max_model_len)
                for at in range(chunk.tokens):
                    own, mask = chunk.start + at, int(step.tree_masks[step.query_starts[index] + at])
                    hidden = {own - back for back in range(64) if mask >> back & 1}
                    rows = [row for row, token in enumerate(held) if token <= own and token not in hidden]
                    first = policy.visible.first(len(rows) - 1)
                    for row in (*rows[: min(first, policy.visible.pinned)], *rows[first:]):
                        there = self.group_cells[number][table[row // size], row % size]
                        assert there == self.cells[standing.blocks[held[row] // size], held[row] % size]

    def _check_snapshots(self, snapshots: StateSnapshots, held: set[int], kept: set[int]) -> None:
        """Of blocks that may be found only, or that are under way; and no slot is lost, or has two owners."""
        owned = snapshots._slots
        assert owned.keys() <= held | kept, "a block that nobody can find has a snapshot"
        slots = sorted([*owned.values(), *snapshots._free])
        assert slots == list(range(self.limits.max_sequences, self.limits.max_sequences + snapshots.count))
        for block, slot in owned.items():
            read = self.states[slot]
            assert not len(read) % self.limits.block_size
            assert read[-self.limits.block_size :] == self.cells[block].tolist(), "the snapshot is another block's"

    def _carry(self, chunks: tuple[Chunk, ...]) -> None:
        """What the step does to the states of its seats."""
        for request, start, tokens, *_ in chunks if self.snapshots is not None else ():
            seat, size = request.standing.seat, self.limits.block_size
            assert seat is not None
            cells = self.cells[request.standing.blocks].reshape(-1).tolist()
            before = self.states.get(seat, []) if start else []
            assert before == cells[:start], f"the states at {start} are others (blocks of {size})"
            self.states[seat] = cells[: start + tokens]

    def _copy_states(self, source: int, destination: int) -> None:
        self.states[destination] = list(self.states[source])

    def _break(self, chunks: tuple[Chunk, ...]) -> None:
        size = self.limits.block_size
        for request, start, tokens, *_ in chunks:
            at = self.breaks_at.get(request)
            if at is not None and start <= at < start + tokens:
                for group, cells in enumerate((self.cells, *self.group_cells)):
                    cells.reshape(-1)[request.standing.slot(group, at, size)] = NAN

    def _check_plan(self, plan: StepPlan, chunks: tuple[Chunk, ...]) -> None:
        assert chunks or self.scheduler.idle, "a step without work while requests are left"
        assert sum(chunk.tokens for chunk in chunks) <= self.limits.max_batch_tokens
        assert sum(chunk.logit_rows for chunk in chunks) <= self.limits.max_logit_rows
        assert len(chunks) <= self.limits.max_sequences
        assert len({id(chunk.request) for chunk in chunks}) == len(chunks)
        written: set[int] = set()
        for chunk in chunks:
            request = chunk.request
            assert chunk.start == request.computed
            assert 1 <= chunk.tokens - len(chunk.draft) <= request.pending
            rows = chunk.tokens if chunk.draft else request.logit_rows(chunk.tokens)
            assert chunk.logit_rows == rows
            size = self.limits.block_size
            own = {request.standing.blocks[p // size] for p in range(chunk.start, chunk.start + chunk.tokens)}
            assert all(self.pool.holders(block) == 1 for block in own), "a block that others hold is written"
            for group, table in zip(self.groups, request.standing.groups, strict=True):
                begin = chunk.start - table.dropped
                places = range(begin // size, -(-(begin + chunk.tokens) // size))
                assert all(group.pool.holders(table.blocks[place]) == 1 for place in places)
            assert not own & written, "a block has two writers"
            written |= own

    def _check_inputs(self, step: Step, chunks: tuple[Chunk, ...]) -> None:
        """The arrays, which are advanced from step to step, are those that one would write for this step alone."""
        size = self.limits.block_size
        places = [(chunk.request, at) for chunk in chunks for at in range(chunk.start, chunk.start + chunk.tokens)]
        assert step.input_ids.tolist() == [token for chunk in chunks for token in chunk.token_ids]
        ahead = [depth for c in chunks for depth in (*range(c.tokens - len(c.draft)), *c.draft.depths())]
        assert step.positions.tolist() == [
            chunk.start + at for chunk, at in zip((c for c in chunks for _ in range(c.tokens)), ahead, strict=True)
        ]
        hidden = [mask for c in chunks for mask in (*[0] * (c.tokens - len(c.draft)), *c.draft.masks())]
        assert step.tree_masks.tolist() == hidden
        assert step.slot_mapping.tolist() == [r.standing.blocks[at // size] * size + at % size for r, at in places]
        ends = np.cumsum([chunk.tokens for chunk in chunks]).tolist()
        assert step.query_starts.tolist() == [0, *ends]
        assert step.context_lens.tolist() == [chunk.start + chunk.tokens for chunk in chunks]
        rows = [range(end - chunk.logit_rows, end) for chunk, end in zip(chunks, ends, strict=True)]
        assert step.logit_rows.tolist() == [row for of_request in rows for row in of_request]
        for table, chunk in zip(step.block_tables.tolist(), chunks, strict=True):
            used = -(-(chunk.start + chunk.tokens) // size)
            assert table[:used] == chunk.request.standing.blocks[:used]

    def _move_rows(self, cuts: Cuts) -> None:
        for numbers in cuts.compactions:
            self._compact(numbers)
        for group, moves in cuts.moves.items():
            sources, destinations = np.array(moves, np.int32).T.copy()
            self._move_slots(sources, destinations, group)

    def _compact(self, numbers: Sequence[int]) -> None:
        """What ops of a graph do in group 1: the first and the last rows stay, or all. See llmc/ops/compact_kv.py."""
        (rows, kept, queries, _, pinned), size = numbers[:COMPACTION_HEADER], self.limits.block_size
        ends = accumulate((-(-rows // size), -(-kept // size), queries), initial=COMPACTION_HEADER)
        blocks, places, slots = (numbers[begin:end] for begin, end in pairwise(ends))
        policy = self.policies[0]
        shared = pinned // size
        assert places[:shared] == blocks[:shared], "pinned rows have moved"
        sinks = policy.sinks if isinstance(policy, Streaming) else kept
        sources = [*range(sinks), *range(rows - kept + sinks, rows)]
        cells = self.group_cells[0].reshape(-1)
        before = cells[[blocks[row // size] * size + row % size for row in range(rows)]]
        cells[[places[row // size] * size + row % size for row in range(kept)]] = before[sources]
        if policy.queries is not None:
            held = self.group_cells[self.policies.index(policy.queries)].reshape(-1)[list(slots)]
            assert held.tolist() == before[rows - queries :].tolist(), "these are not the last queries"

    def _move_slots(self, sources: Ints, destinations: Ints, group: int) -> None:
        cells = (self.cells, *self.group_cells)[group].reshape(-1)
        cells[destinations] = cells[sources]

    def _seen(self, step: Step, chunks: tuple[Chunk, ...]) -> Iterator[list[int]]:
        """What the tokens whose logits are wanted see of the cache."""
        end = 0
        for chunk in chunks:
            end += chunk.tokens
            cells = self.cells[chunk.request.standing.blocks].reshape(-1)
            for index in range(chunk.tokens - chunk.logit_rows, chunk.tokens):
                own, mask = chunk.start + index, int(step.tree_masks[end - chunk.tokens + index])
                yield [int(cells[row]) for row in range(own + 1) if own - row > 63 or not mask >> (own - row) & 1]


class AwaitedReads(Tier):
    """Runs its late reads where somebody waits for them."""

    def __init__(self, reading: LateReads, max_bytes: int, block_bytes: Sequence[int]) -> None:
        self._reading = reading
        super().__init__(HostBlocks(), max_bytes, block_bytes, writer=AtOnce(), reader=reading)

    def fetch(self, keys: Sequence[BlockKey]) -> Fetch:
        fetch, reading = super().fetch(keys), self._reading

        class Awaited(Fetch):
            def wait(self, seconds: float) -> bool:
                reading.go_on()
                return self.is_done

        fetch.__class__ = Awaited
        return fetch


class CellCaches:
    """The cells of each group of caches as caches whose blocks can leave."""

    def __init__(self, *cells: npt.NDArray[np.int64]) -> None:
        self._cells = cells

    def read_blocks(self, blocks: Sequence[int], group: int = 0) -> Callable[[], Bytes]:
        rows = self._cells[group][list(blocks)].view(np.uint8)
        return lambda: rows

    def write_blocks(self, blocks: Sequence[int], contents: Sequence[Bytes], group: int = 0) -> None:
        for block, content in zip(blocks, contents, strict=True):
            self._cells[group][block] = content.view(np.int64)


class AtOnce(Executor):
    """Runs what it is given at once, so that a test has one order of events."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **keywords: Any) -> Future[Any]:
        done = Future[Any]()
        done.set_result(fn(*args, **keywords))
        return done


class LateReads(Executor):
    """Runs what it is given when it is told to."""

    def __init__(self) -> None:
        self._waiting: list[Callable[[], Any]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **keywords: Any) -> Future[Any]:
        self._waiting.append(partial(fn, *args, **keywords))
        return Future()

    def go_on(self) -> None:
        """Run all."""
        waiting, self._waiting = self._waiting, []
        for work in waiting:
            work()


def _held(policy: CachePolicy, chunk: Chunk) -> list[int]:
    """Which token of the request each row of its table holds, those of the chunk included."""
    if not policy.drops_rows or chunk.request.standing.reading is not None:
        return list(range(chunk.start + chunk.tokens))
    before = policy.held(chunk.start, chunk.request.prompt_length)
    return [*before, *range(chunk.start, chunk.start + chunk.tokens)]
