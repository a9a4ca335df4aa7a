"""One replica on a virtual clock: the scheduler that serves real requests, around steps whose seconds are predicted."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from llmc.bench.request_record import RequestRecord
from llmc.errors import RequestError
from llmc.prediction.step_shape import StepShape
from llmc.program import Limits
from llmc.runtime.loop.publish import publish
from llmc.runtime.loop.step import Ints
from llmc.runtime.requests.request import Origin, SampledRequest
from llmc.runtime.sampling.sampler import Sampler
from llmc.runtime.sampling.sampling_params import SamplingParams
from llmc.runtime.scheduling.block_pool import BlockPool
from llmc.runtime.scheduling.group_pool import GroupPool
from llmc.runtime.scheduling.scheduler import Scheduler
from llmc.runtime.scheduling.step_plan import StepPlan
from llmc.simulation.load import Arrival

_NO_LOGITS = np.zeros((0, 1), np.float32)
_NO_TOKENS = np.zeros(0, np.int64)


class Replica:
    """Requests that one scheduler serves. now: its clock in seconds. steps: number of steps taken. most_blocks: maximum
    number of blocks in use.

    seconds: returns the seconds of a step. blocks: number of blocks of its KV cache. groups: the pools of the groups of
    caches after the first.
    """

    def __init__(
        self,
        limits: Limits,
        blocks: int,
        seconds: Callable[[StepShape], float],
        groups: Sequence[GroupPool] = (),
    ) -> None:
        self.now = 0.0
        self.steps = 0
        self.most_blocks = 0
        self._seconds = seconds
        self._pool = BlockPool(blocks)
        self._scheduler = Scheduler(limits, self._pool, clock=lambda: self.now, groups=groups)
        self._sampler = Sampler(SamplingParams(temperature=0), _NO_TOKENS, 1, _NO_TOKENS)

    @property
    def in_flight(self) -> int:
        """Requests that have not ended."""
        return self._scheduler.running + self._scheduler.waiting

    @property
    def preemptions(self) -> int:
        """The number of times that a request lost its blocks."""
        return self._scheduler.preemptions

    def add(self, arrival: Arrival) -> RequestRecord:
        """Add a request that has arrived now; the record fills while it is served."""
        record = RequestRecord(sent=arrival.arrival, prompt_tokens=arrival.prompt_tokens)
        self._scheduler.add(_Request(arrival, record, self._sampler, lambda: self.now))
        return record

    def run_until(self, moment: float) -> None:
        """Take every step that begins before that moment."""
        while self.now < moment and not self._scheduler.idle:
            plan = self._scheduler.schedule()
            self.now += self._seconds(step_shape(plan))
            self.steps += 1
            self.most_blocks = max(self.most_blocks, self._pool.used)
            publish(plan, _Tokens(), self._scheduler, _move_nothing)
        if self._scheduler.idle and np.isfinite(moment):
            self.now = max(self.now, moment)


def step_shape(plan: StepPlan) -> StepShape:
    """The shape that costs depend on: every decode reads all of its positions, a chunk's tokens those before them."""
    tokens = rows = requests = len(plan.decodes)
    context = pairs = sum([len(request.tokens) for request in plan.decodes])
    for chunk in plan.chunks:
        tokens, rows, requests = tokens + chunk.tokens, rows + chunk.logit_rows, requests + 1
        context += chunk.start + chunk.tokens
        pairs += chunk.tokens * chunk.start + chunk.tokens * (chunk.tokens + 1) // 2
    return StepShape(tokens, rows, requests, context, pairs)


class _Request(SampledRequest):
    """A request whose tokens are all 0, and which ends at its planned number of tokens."""

    is_steady = True

    def __init__(self, arrival: Arrival, record: RequestRecord, sampler: Sampler, now: Callable[[], float]) -> None:
        # Shared prefixes of prompts are unknown.
        origin = Origin(salt=None, arrived=arrival.arrival)
        super().__init__([0] * arrival.prompt_tokens, sampler, every_logit=False, origin=origin)
        self.prompt_tokens = arrival.prompt_tokens
        self.most = arrival.tokens
        self._record, self._now = record, now

    def accept(self, token: int, logits: npt.NDArray[np.float32] | None) -> None:
        """Record the time of the token, and end the request after its last one."""
        self.tokens.append(token)
        self._record.pieces.append(self._now())
        self._record.output_tokens += 1
        if len(self.tokens) >= self.most:
            self._record.ended = self._now()
            self.end()

    def receive(self, start: int, logits: npt.NDArray[np.float32]) -> None:
        raise AssertionError("a steady request reads no logits")


class _Tokens:
    """StepResults in which every token is 0."""

    def logits(self, first: int, count: int) -> npt.NDArray[np.float32]:
        return _NO_LOGITS

    def tokens(self, samplers: Sequence[Sampler], rows: Sequence[int]) -> Sequence[int | RequestError]:
        return [0] * len(rows)

    def guesses(self, first: int, count: int) -> Sequence[int]:
        return [0] * count


def _move_nothing(sources: Ints, destinations: Ints, group: int) -> None:
    """Do nothing: no block holds anything."""
