"""Choose the tokens and requests of the next step. The scheduler is independent of models and only counts tokens and
blocks.

There are no separate prefill and decode phases: a step has one budget of tokens; running requests that need a single
token come first, then chunks of prompts, then new requests, the urgent ones first and each kind in order of arrival.
When the pool runs dry the youngest of the least urgent requests gives its blocks back and later computes its tokens
again (preemption by recompute, as in Kwon et al. 2023, "PagedAttention").

A step at hundreds of running requests must cost microseconds, so it costs what changes: nothing is done for a request
that decodes within a block that it has, and those whose blocks are full in the same step get theirs together.
"""

import time
from collections.abc import Callable, Sequence

from llmc.errors import RequestError
from llmc.program import Limits
from llmc.runtime.kv_tier.block_offload import BlockOffload
from llmc.runtime.kv_tier.saved_request import SavedRequest
from llmc.runtime.prefix_cache.prefix_cache import PrefixCache
from llmc.runtime.prefix_cache.state_snapshots import StateSnapshots
from llmc.runtime.requests.request import Origin, Request, SampledRequest
from llmc.runtime.scheduling.adapter_slots import AdapterSlots
from llmc.runtime.scheduling.block_pool import BlockPool
from llmc.runtime.scheduling.deadlines import Deadlines
from llmc.runtime.scheduling.decode_set import DecodeSet
from llmc.runtime.scheduling.families import Families
from llmc.runtime.scheduling.full_tables import FullTables
from llmc.runtime.scheduling.group_pool import GroupPool
from llmc.runtime.scheduling.request_blocks import Cuts, RequestBlocks
from llmc.runtime.scheduling.second_tier import SecondTier, blocks_lost
from llmc.runtime.scheduling.step_plan import Chunk, StepOutline, StepPlan
from llmc.runtime.scheduling.waiting_requests import WaitingRequests
from llmc.runtime.speculation.draft import NO_DRAFT
from llmc.runtime.speculation.speculation import Speculation


class Scheduler:
    """Requests waiting, running (holding blocks) or parked (running, with nothing to compute yet), and their pool.

    max_step_tokens: a lower limit of tokens per step than the engine's. clock: seconds, as in Request.arrived.
    speculation: the drafter; a request with drafts is a chunk of its last token and the drafts. adapters: slots of the
    engine's pools; a request waits if its adapter cannot get a slot. snapshots: those of a model with states.
    whole_texts: all tokens of a request come in one step. groups: pools of cache groups 1 and up. offload: the second
    tier, if there is one. move_rows: moves rows of the caches at once, between two steps.
    """

    def __init__(
        self,
        limits: Limits,
        pool: BlockPool,
        max_step_tokens: int | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        speculation: Speculation | None = None,
        adapters: AdapterSlots | None = None,
        snapshots: StateSnapshots | None = None,
        whole_texts: bool = False,
        groups: Sequence[GroupPool] = (),
        offload: BlockOffload | None = None,
        move_rows: Callable[[Cuts], None] = lambda cuts: None,
    ) -> None:
        self._blocks = RequestBlocks(limits, pool, groups)
        self._whole_texts = whole_texts
        self._adapters = adapters
        self._speculation = speculation
        self._snapshots = snapshots
        self.prefix_cache = PrefixCache(pool, limits.block_size, snapshots, groups, offload)
        self.second_tier = (
            None if offload is None else SecondTier(offload, self.prefix_cache, pool, self._blocks, limits.block_size)
        )
        # Requests that cannot be computed again, and whose blocks are lost.
        self._lost: set[Request] = set()
        self.preemptions = 0
        self.block_size, self._blocks_for = limits.block_size, limits.blocks_for
        self.groups = 1 + len(groups)
        self._budget = min(limits.max_batch_tokens, max_step_tokens or limits.max_batch_tokens)
        self._rows = limits.max_logit_rows
        self._clock = clock
        self._waiting = WaitingRequests()
        self._prefilling: dict[Request, None] = {}  # Dicts for their order and their quick removal.
        self._parked: dict[Request, None] = {}
        self._decoding = DecodeSet(limits.block_size)
        self._drafting: dict[Request, SampledRequest] = {}  # Steady requests that get drafts: all of them, or none.
        self._forked: list[Request] = []  # Decoding requests that may share the block they write next.
        self._full = FullTables(self._blocks, self._preempt, move_rows)
        # Not more than a step has room for, so every decoding request is in every step.
        self._free_seats = list(range(min(limits.max_sequences, self._budget, self._rows) - 1, -1, -1))
        self._deadlines = Deadlines()
        self._families = Families()
        self._arrivals = 0
        self._number = 0

    @property
    def idle(self) -> bool:
        """Whether no request is left."""
        return not (self._decoding or self._drafting or self._prefilling or self._parked or self.waiting)

    @property
    def running(self) -> int:
        """Requests that hold blocks, or are parked."""
        return len(self._decoding) + len(self._drafting) + len(self._prefilling) + len(self._parked)

    @property
    def waiting(self) -> int:
        """Requests that hold none yet, or no more."""
        return len(self._waiting)

    def add(self, request: Request) -> None:
        """Queue a request of at most max_model_len tokens; the pool must hold at least one of that length."""
        self._arrivals += 1
        request.standing.sequence = self._arrivals
        self._families.add(request)
        self._waiting.add(request)
        self._deadlines.watch(request)

    def fork(self, parent: Request, child: Request) -> None:
        """Start a request with the parent's first tokens on the parent's blocks; they part when one of them writes.

        Where no seat is free the child waits and computes them again.
        """
        first, own = parent.standing, child.standing
        own.sequence, own.started = first.sequence, first.started
        self._families.add(child)
        self._deadlines.watch(child)
        if not first.is_seated or not self._free_seats:
            self._waiting.put_back(child)
            return
        self._take_seat(child)
        if self._snapshots is not None:
            self._snapshots.fork(parent, child)
        own.computed = parent.computed
        self.prefix_cache.fork(parent, child)
        self._blocks.fork(parent, child)
        self._full.reach(child)
        self._forked += (parent, child)
        self._place(child)

    def resume(self, request: Request) -> None:
        """A parked request has tokens to compute again."""
        del self._parked[request]
        if not request.standing.is_seated:
            self._waiting.put_back(request)
        else:
            self._place(request)

    def remove(self, request: Request) -> None:
        """Forget a request and free its blocks at once; an unknown one is ignored."""
        self._families.remove(request)
        self._lost.discard(request)
        if self.second_tier is not None:
            self.second_tier.forget(request)
        if request.decoding.place is not None or request in self._drafting:
            self._stop_decoding(request)
        elif request in self._parked:
            self.prefix_cache.register(request)
            del self._parked[request]
        elif request in self._prefilling:
            del self._prefilling[request]
        elif request.standing.is_waiting:
            self._waiting.take(request)
        else:
            return
        self._release(request)
        self._deadlines.drop(request)
        if self._speculation is not None:
            broken = self._speculation.forget(request)
            if broken is not None:
                self.fail(request, broken)

    def drop(self, origin: Origin) -> None:
        """Remove all sequences of a client's request."""
        for request in self._families.members(origin):
            self.remove(request)

    def fail(self, request: Request, error: RequestError) -> None:
        """End a client's request with an error. Its sequences stay in the step that is under way, which gives them
        nothing any more, and hold their blocks until `drop_failed`."""
        self._families.fail(request, error)

    def drop_failed(self) -> None:
        """Remove the sequences of requests that have failed, when no step is under way."""
        for request in self._families.take_failed():
            self.remove(request)

    def advance(self, chunk: Chunk, tokens: int) -> None:
        """Record that `tokens` tokens of the chunk have been computed: all, or for drafts the accepted ones."""
        chunk.request.standing.computed += tokens
        self._full.reach(chunk.request)
        if self._snapshots is not None:
            self._snapshots.reach(chunk.request)

    def settle(self, request: Request) -> None:
        """Move a request to its next queue after a step that was not a plain decode; remove it if it has finished.

        Call it only after a step that computed the request's logits; the request has failed if they were not finite.
        All rows of a decoding or parked request are therefore finite, and only their blocks enter the prefix cache.
        """
        if request in self._prefilling and request.pending <= 1:
            self.prefix_cache.register(request)
            if not request.finished:
                del self._prefilling[request]
                self._place(request)
        if request.finished:
            self.remove(request)

    def preempt_all(self) -> None:
        """Take every block back. The plan that was made last is not to be computed then."""
        for request in [*self._decoding.requests(), *self._drafting, *self._prefilling, *self._parked]:
            if request.standing.is_seated:
                self._preempt(request, None)

    def expired(self) -> list[Request]:
        """Requests whose deadline has passed since the last call; they are still in the queue."""
        return [r for r in self._deadlines.passed(self._clock()) if not r.finished] if self._deadlines else []

    def schedule(self) -> StepPlan:
        """The next step, with blocks for its tokens. Empty only if no request has anything to compute.

        The caller computes it, gives each request its logits or its token, advances the chunks, and then settles those
        that got logits and every decode that has finished.
        """
        self._number += 1
        preemptions = self.preemptions
        if self._speculation is not None and not self._speculation.rests(len(self._decoding)):
            self._choose_who_drafts(self._speculation)
        outline = StepOutline(self._budget - len(self._decoding), self._rows - len(self._decoding))
        self._grow_decodes(outline)
        if self._speculation is not None and self._drafting:
            self._extend_with_drafts(self._speculation, outline)
        for request in self._waiting.by_urgency(self._prefilling):
            if request.standing.is_seated:
                count = self._blocks.fitting(request, outline.tokens, outline.rows)
                if count > 0 and self._grow(request, count, outline):
                    outline.include(request, count)
                elif request.standing.is_seated:
                    outline.unfinished.append(request)
        if self._free_seats and preemptions == self.preemptions:
            self._waiting.now = self._clock()
            while self._free_seats and self._start_next(outline):
                pass
        decodes, chunks = self._decoding.requests(), outline.chunks
        if preemptions != self.preemptions:
            # They may include preempted requests.
            chunks = [c for c in chunks if c.request.standing.is_seated]
        if not (decodes or chunks):
            if self.second_tier is not None and self.second_tier.wait():
                return self.schedule()
            # All that fitted has given way to others that did not fit, or parked ones hold what the waiting ones need.
            is_stuck = self._parked and self.waiting and self._preempt_parked(outline)
            if is_stuck or preemptions != self.preemptions:
                return self.schedule()
        entered = self._decoding.take_entered()
        return StepPlan(decodes, chunks, outline.copies, outline.grown, entered, outline.group_copies)

    def schedule_ahead(self, decodes: list[SampledRequest]) -> StepPlan | None:
        """The step after one of these decodes, while their next tokens are unknown.

        None, and nothing is changed, unless it decodes exactly the same requests, and their blocks are there.
        """
        others = (self._prefilling, self._parked, self._drafting, self._forked)
        if any(others) or (self._waiting and self._free_seats) or self._decoding.requests() != decodes:
            return None
        grown = list(self._decoding.cohort(self._number + 1))
        # Windows, policies and snapshots would count a token too few at the end of a block.
        if grown and (self._blocks.groups or self._snapshots or not self._blocks.fit(len(grown))):
            return None
        self._number += 1
        if grown:
            self._blocks.append(grown, len(grown))
        return StepPlan(decodes, [], {}, grown, [], {})

    def _grow_decodes(self, outline: StepOutline) -> None:
        """Give the decoding requests the blocks that they write next."""
        cohort = self._decoding.cohort(self._number)
        if self._snapshots is not None:
            self._snapshots.pass_ends(cohort)
        for request in self._full.cut(cohort, outline) if self._blocks.groups else ():
            self._decoding.note_exchange(request)
        if self._blocks.fit(len(cohort)):
            if cohort:
                self._blocks.append(cohort, len(cohort))
                outline.grown.extend(cohort)
        else:
            for request in list(cohort):
                if request.decoding.place is not None and self._grow(request, 1, outline):
                    outline.grown.append(request)
        if self._forked:
            forked, self._forked = self._forked, []
            for request in forked:
                if request.decoding.place is not None and self._grow(request, 1, outline):
                    self._decoding.note_exchange(request)

    def _choose_who_drafts(self, speculation: Speculation) -> None:
        """Choose all steady requests or none to draft: their number decides whether drafts pay."""
        if speculation.pays(len(self._decoding) + len(self._drafting), min(self._budget, self._rows)):
            for request in self._decoding.requests() if self._decoding else ():
                self._stop_decoding(request)
                self._full.reach(request)
                self._drafting[request] = request
        else:
            for request in self._drafting.values():
                self._blocks.shorten(request, self._blocks_for(request.computed))  # One that decodes has no others.
                self._decoding.add(request, self._number)
            self._drafting.clear()

    def _extend_with_drafts(self, speculation: Speculation, outline: StepOutline) -> None:
        """Add each drafting request's last token, and drafts as far as the step and the pool have room for them.

        Drafts get their blocks before they are made, because a drafter may also store data in them.
        """
        for request in list(self._drafting):
            if request.standing.is_seated:
                self._grow(request, 1, outline)
        requests = list(self._drafting.values())
        most = speculation.most(requests, min(outline.tokens, outline.rows) - len(requests))
        for index, request in enumerate(requests):
            most[index] = min(most[index], self._blocks.until_cut(request) - 1)
            missing = self._blocks_for(len(request.tokens) + most[index]) - len(request.standing.blocks)
            if not self._blocks.fit(missing + 1):
                most[index] = 0
            elif missing > 0:
                self._blocks.extend(request, missing)
        for request, found in zip(requests, speculation.propose(requests, most), strict=True):
            if isinstance(found, RequestError):
                self.fail(request, found)
                found = NO_DRAFT
            outline.include(request, 1 + len(found), found)

    def _start_next(self, outline: StepOutline) -> bool:
        """Start the most urgent waiting request if it has room; it needs blocks for all of its tokens."""
        request = self._waiting.first()
        if request is None or not outline.tokens or not self._has_slot(request):
            return False
        own, found = request.standing, self.prefix_cache.match(request)
        if not self._blocks.can_start(request, found, outline.unfinished):
            return False
        if self.second_tier is not None:
            if not self.second_tier.has_arrived(request, outline):
                return False
            saved = self.second_tier.swapped(request)
            if saved is not None:
                return self._return(request, saved, outline)
            found = self.prefix_cache.match(request)
        known = len(found)
        own.computed = known * self.block_size
        count = self._blocks.fitting(request, outline.tokens, outline.rows, found)
        if not count or (self._whole_texts and count < request.pending):
            own.computed = 0
            return False
        self._waiting.take(request)
        self._blocks.start(request, found, self._blocks_for(own.computed + count))
        self._take_seat(request)
        self.prefix_cache.start(request, known)
        if own.started is None:
            own.started = self._waiting.now
            own.cached_tokens = own.computed
        self._prefilling[request] = None
        outline.include(request, count)
        is_lost = self.second_tier is not None and self.second_tier.forget(request)
        if is_lost or request in self._lost:
            self.fail(request, blocks_lost())
        return True

    def _return(self, request: Request, saved: SavedRequest, outline: StepOutline) -> bool:
        """Let a swapped-out request continue where it was, if there is room."""
        assert self.second_tier is not None
        found = self.prefix_cache.run(request)[: saved.shared]
        if not self._blocks.can_return(request, found, saved, outline.unfinished):
            return False
        self._waiting.take(request)
        self.second_tier.swap_in(request)
        self._take_seat(request)
        self.prefix_cache.start(request, saved.shared)
        self._full.reach(request)  # It was swapped out before its full table was cut, perhaps.
        self._full.cut(dict[Request, None](), outline)
        self._prefilling[request] = None
        count = self._blocks.fitting(request, outline.tokens, outline.rows)
        if count > 0:
            self._blocks.extend(request, self._blocks_for(request.computed + count) - len(request.standing.blocks))
            outline.include(request, count)
        elif request.pending:
            outline.unfinished.append(request)
        return True

    def _grow(self, request: Request, count: int, outline: StepOutline) -> bool:
        """Make the next `count` positions the request's own to write; false if it had to give way itself."""
        index, end = request.computed // self.block_size, self._blocks_for(request.computed + count)
        while not self._blocks.can_write(request, index, end):
            victim = self._victim()
            self._preempt(victim, outline)
            if victim is request:
                return False
        self._blocks.write(request, index, end, outline)
        return True

    def _victim(self) -> Request:
        """The youngest of the least urgent requests that hold blocks."""
        holding: list[Request] = [*self._decoding.requests(), *self._drafting]
        holding += [r for group in (self._prefilling, self._parked) for r in group if r.standing.is_seated]
        return self._waiting.least_urgent(holding)

    def _preempt(self, victim: Request, outline: StepOutline | None) -> None:
        """Take a request's blocks back. outline: the step that is planned; None after one that has failed, when no one
        knows what it has copied."""
        self.preemptions += 1
        if victim in self._parked:
            self._swap_out(victim, outline)
            self._release(victim)
            return
        if victim.decoding.place is not None or victim in self._drafting:
            self._stop_decoding(victim)
        else:
            del self._prefilling[victim]
        self._swap_out(victim, outline)
        self._release(victim)
        self._waiting.put_back(victim)

    def _swap_out(self, victim: Request, outline: StepOutline | None) -> None:
        must_return, tier = self._blocks.must_return(victim), self.second_tier
        is_saved = tier is not None and outline is not None and tier.swap_out(victim, outline, must_return=must_return)
        if must_return and not is_saved:
            self._lost.add(victim)

    def _preempt_parked(self, outline: StepOutline) -> bool:
        holding = [request for request in self._parked if request.standing.is_seated]
        if holding:
            self._preempt(self._waiting.least_urgent(holding), outline)
        return bool(holding)

    def _stop_decoding(self, request: Request) -> None:
        if self._drafting.pop(request, None) is None:
            request.standing.computed = request.computed
            self._decoding.remove(request)
        self.prefix_cache.register(request)

    def _release(self, request: Request) -> None:
        own = request.standing
        if own.seat is not None:
            self._free_seats.append(own.seat)
            own.seat = None
            if request.adapter is not None and self._adapters is not None:
                self._adapters.release(request.adapter)
        self.prefix_cache.leave(request)
        self._blocks.release(request)
        own.computed = 0

    def _take_seat(self, request: Request) -> None:
        request.standing.seat = self._free_seats.pop()
        if request.adapter is not None and self._adapters is not None:
            self._adapters.hold(request.adapter)

    def _has_slot(self, request: Request) -> bool:
        return request.adapter is None or self._adapters is None or self._adapters.fits(request.adapter)

    def _place(self, request: Request) -> None:
        pending = request.pending
        if pending == 1 and isinstance(request, SampledRequest) and request.is_steady:
            if self._drafting:
                self._drafting[request] = request
            else:
                self._decoding.add(request, self._number + 1)
        else:
            (self._prefilling if pending else self._parked)[request] = None
