"""The drafter, the number of drafts, and their outcome. Answers never depend on drafts: see docs/speculation.md."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from llmc.errors import RequestError
from llmc.runtime.engine_stats import SpeculationStats
from llmc.runtime.executors.executor import Executor
from llmc.runtime.loop.judged_results import StepResults
from llmc.runtime.requests.boundary import attempt, attempts
from llmc.runtime.requests.request import Request, SampledRequest
from llmc.runtime.scheduling.block_pool import BlockPool
from llmc.runtime.scheduling.step_plan import Chunk, StepPlan
from llmc.runtime.speculation.acceptance import Acceptance
from llmc.runtime.speculation.acceptance_config import AcceptanceMethod
from llmc.runtime.speculation.computed_step import ComputedStep
from llmc.runtime.speculation.draft import Draft
from llmc.runtime.speculation.drafter import CachingDrafter, Drafter
from llmc.runtime.speculation.gate import Gate


class Speculation:
    """Calls a drafter while its drafts pay. most: maximum drafts per request and step. acceptance: the acceptance
    method for requests that draw at random. clock: seconds, for the times of steps and drafts."""

    def __init__(
        self,
        new_drafter: Callable[[], Drafter],
        most: int,
        new_gate: Callable[[int], Gate] = Gate,
        acceptance: Acceptance | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._new_drafter, self._new_gate = new_drafter, new_gate
        self._clock = clock
        self._acceptance = acceptance
        self._drafter = new_drafter()
        self._pool: BlockPool | None = None
        self._gate = new_gate(most)
        self._most = 0
        # The next step's beginning and drafts.
        self._begin = self._drafting = 0.0
        self._asked: dict[Request, int] = {}
        self._sides: tuple[str, ...] = ()
        # This number of steps with this number of requests have no drafts, without a new decision.
        self._rest, self._resting = 0, 0
        # Whether the next step, if it has no chunks, leaves no sides and is not observed: as most without drafts.
        self.is_idle = False
        self._proposed = self._asked_before = 0
        self._drafts = self._draft_tokens = 0
        self._accepted_at = [0] * most

    @property
    def stats(self) -> SpeculationStats:
        """Statistics of all drafts until now."""
        name = AcceptanceMethod.INVARIANT.value if self._acceptance is None else self._acceptance.name
        return SpeculationStats(self._drafts, self._draft_tokens, tuple(self._accepted_at), name)

    def watch(self, pool: BlockPool) -> None:
        """Set the blocks of the loop that it serves; called once."""
        self._pool = pool
        if isinstance(self._drafter, CachingDrafter):
            self._drafter.watch(pool)

    def close(self) -> None:
        """Free the drafter."""
        if isinstance(self._drafter, CachingDrafter):
            self._drafter.close()

    def renewed(self) -> "Speculation":
        """A new instance for a loop without requests, without the outputs of earlier ones."""
        return Speculation(self._new_drafter, self._gate.most, self._new_gate, self._acceptance, self._clock)

    def rests(self, requests: int) -> bool:
        """Whether the next step, of `requests` requests, has no drafts like the last one; no other call is then
        needed."""
        if self._rest and requests == self._resting:
            self._rest -= 1
            return True
        return False

    def pays(self, requests: int, room: int) -> bool:
        """Whether `requests` requests should get drafts in the next step, which begins now and has room for `room`
        tokens."""
        if requests:
            self._most = self._gate.drafts(requests, room)
        if not self._most:
            self._asked_before = 0
        self.is_idle = not (self._most or self._sides or self._gate.wants_time)
        self._rest, self._resting = self._gate.rest() if self.is_idle else 0, requests
        if not self.is_idle:
            self._begin = self._clock()
        return self._most > 0

    def most(self, requests: Sequence[SampledRequest], room: int) -> list[int]:
        """The maximum number of drafts per request: at most `room` in total, and none that its own end would cut
        off."""
        most = []
        for request in requests:
            count = max(0, min(self._most, room, request.most - len(request.tokens) - 1))
            most.append(count)
            room -= count
        return most

    def propose(self, requests: Sequence[SampledRequest], most: Sequence[int]) -> Sequence[Draft | RequestError]:
        """Drafts for each request, at most `most`; the request has blocks for them."""
        begin = self._clock()
        proposed = zip(requests, self._drafter.propose(requests, most), strict=True)
        checked = attempts(self._checked, proposed)
        drafts = [draft for draft in checked if isinstance(draft, Draft)]
        if len(drafts) < len(checked):
            self._begin_anew()
        self._drafting = self._clock() - begin
        self._proposed = max((draft.depth for draft in drafts), default=0)
        self._asked = {request: count for request, count in zip(requests, most, strict=True) if count}
        return checked

    def sides(self, plan: StepPlan) -> tuple[str, ...]:
        """The side outputs that the last scheduled step must return; called once per step."""
        self._sides = self._drafter.sides(self._most > 0, any(map(_is_of_prompt, plan.chunks)))
        return self._sides

    def observe(
        self, plan: StepPlan, executor: Executor | None = None, results: StepResults | None = None
    ) -> Mapping[Request, RequestError]:
        """The plan's step has been computed, and its requests have got their tokens.

        executor: has the step's side outputs. results: the step's results. Returns the requests that fail, with their
        errors.
        """
        failed: Mapping[Request, RequestError] = {}
        if executor is not None and results is not None and (self._most or self._sides):
            begin = self._clock()
            failed = self._drafter.observe(ComputedStep(plan, self._sides, executor, results))
            if failed:
                self._begin_anew()
            self._drafting += self._clock() - begin
        if self._most:
            self._note_drafted(plan)
            # A drafter that starts with a request may have to read much, once.
            self._asked_before, self._asked = len(self._asked), {}
            self._proposed = 0
        elif not plan.chunks and self._gate.wants_time:
            self._gate.note_plain(len(plan.decodes), self._clock() - self._begin)
        self._drafting = 0.0
        return failed

    def _note_drafted(self, plan: StepPlan) -> None:
        is_decoding = not plan.decodes
        tokens = gained = 0
        for chunk in plan.chunks:
            request = chunk.request
            tokens += chunk.tokens
            if not (chunk.tokens == 1 + len(chunk.draft) and isinstance(request, SampledRequest)):
                is_decoding = False
                continue
            accepted = max(0, len(request.tokens) - chunk.start - 2)
            gained += 1 + accepted
            if chunk.draft:
                self._count(chunk.draft, accepted)
            if request in self._asked:
                self._gate.note_drafts(self._asked[request], chunk.draft, accepted)
        has_read = len(self._asked) > self._asked_before
        if self._proposed and not has_read:
            self._gate.note_drafting(len(self._asked), self._proposed, self._drafting)
        if is_decoding and plan.chunks:
            seconds = self._clock() - self._begin - self._drafting
            self._gate.note_drafted(len(plan.chunks), tokens, gained, seconds, self._drafting, has_read=has_read)

    def forget(self, request: Request) -> RequestError | None:
        """Drop the drafter's state of a request that has ended or was dropped. Returns the drafter's error, if any."""
        if not isinstance(request, SampledRequest):
            return None
        error = attempt(self._drafter.forget, request)
        if error is not None:
            self._begin_anew()
        return error

    def _begin_anew(self) -> None:
        """Replace the drafter by a new one without state: an exception may have interrupted the old one anywhere."""
        self._drafter = self._new_drafter()
        if isinstance(self._drafter, CachingDrafter) and self._pool is not None:
            self._drafter.watch(self._pool)

    def _checked(self, request: SampledRequest, draft: Draft | RequestError) -> Draft:
        """The draft without tokens that cannot be accepted, and its acceptance method. Raises the error given in its
        place."""
        if isinstance(draft, RequestError):
            raise draft
        kept = _allowed(request, draft)
        is_judged = self._acceptance is not None and request.sampler.is_random and not kept.parents
        return replace(kept, acceptance=self._acceptance) if is_judged else kept

    def _count(self, draft: Draft, accepted: int) -> None:
        self._drafts += 1
        self._draft_tokens += len(draft)
        for index in range(accepted):
            self._accepted_at[index] += 1


def _allowed(request: SampledRequest, draft: Draft) -> Draft:
    """The draft without tokens that the request's grammar forbids, for which no step is needed."""
    if not draft or not request.sampler.has_mask:
        return draft
    return draft.without(lambda path: request.sampler.count_acceptable(path) < len(path))


def _is_of_prompt(chunk: Chunk) -> bool:
    """Whether the chunk computes tokens that a request has read, not written, or must read again."""
    request = chunk.request
    if chunk.draft:
        return False
    return chunk.tokens > 1 or (isinstance(request, SampledRequest) and chunk.start < request.prompt_tokens)
