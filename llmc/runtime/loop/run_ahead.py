"""Queue a step before the tokens of the step before it are read, so that a device does not wait for the host.

While step n runs, step n + 1 is queued after it: the same requests decode, each from the token that step n chooses for
it on the device. The host then waits for step n and publishes its tokens while step n + 1 runs.

A request that ends in step n, or is dropped meanwhile, is still in step n + 1, and its row is ignored. Its blocks
return to the pool at once. Step n + 1 writes only the row of its last token there, in a block that no other request can
find, and all later writes are queued after that step.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llmc.runtime.executors.executor import Chosen, QueueingExecutor
from llmc.runtime.loop.judged_results import StepResults
from llmc.runtime.loop.publish import compute_choosing, device_results, publish_decodes, usable_rows
from llmc.runtime.loop.step import Step
from llmc.runtime.loop.step_inputs import StepInputs
from llmc.runtime.requests.request import SampledRequest
from llmc.runtime.sampling.row_choice import RowChoice, RowChoices, least_wanted
from llmc.runtime.scheduling.scheduler import Scheduler
from llmc.runtime.scheduling.step_plan import StepPlan

# Number of steps that are not followed after one in which the host chose a token. Such a token costs two steps: the one
# that was queued, and the one whose logits are computed again.
REST_STEPS = 32


@dataclass(slots=True)
class _Queued:
    """A step under way. choices: the choices of its rows. left: number of steps, itself included, until a request ends
    by its length. read: waits for its tokens."""

    plan: StepPlan
    step: Step
    choices: Sequence[RowChoice]
    left: int
    read: Callable[[], Chosen]


class RunAhead:
    """Steps of decodes, at most one of them queued beyond the one that is read.

    is_computing: whether the executor is at work. An exception then leaves requests as they were before the step.
    executor_seconds: time of the last step in the executor, including the planning of the step queued after it.
    """

    def __init__(self, executor: QueueingExecutor, inputs: StepInputs, scheduler: Scheduler) -> None:
        self._executor, self._inputs, self._scheduler = executor, inputs, scheduler
        self._queued: _Queued | None = None
        self._rest = 0
        self.is_computing = False
        self.executor_seconds = 0.0

    def begin(self, plan: StepPlan, step: Step, choices: Sequence[RowChoice | None]) -> bool:
        """Queue a planned step, if it has decodes only and the device chooses all tokens. False if it does not."""
        known = [choice for choice in choices if choice is not None]
        if plan.chunks or len(known) < len(choices):
            return False
        left = min(request.most - len(request.tokens) for request in plan.decodes)
        self._queued = self._queue(plan, step, known, left, is_fed=False)
        return True

    def step(self) -> StepPlan | None:
        """Queue the step after the one under way if it is known, and finish the latter.

        Returns:
            The plan of the finished step, with the requests that are still there. None if there are none.
        """
        queued, self._queued = self._queued, None
        rows = [] if queued is None else _rows_in_place(queued.plan.decodes)
        if queued is None or not rows:
            return None
        begin, decodes = time.perf_counter(), queued.plan.decodes
        following = self._follow(queued) if len(rows) == len(decodes) and not self._rest else None
        self.is_computing = True
        chosen = queued.read()
        # A request whose token the host must choose was fed another one, and its logits are overwritten.
        is_open = not usable_rows(chosen)[rows].all()
        is_wrong = is_open and following is not None
        self._rest = REST_STEPS if is_open else max(0, self._rest - 1)
        results: StepResults
        if is_wrong:
            results = compute_choosing(self._executor, queued.step, queued.choices)
        else:
            results = device_results(self._executor, queued.step, chosen, queued.choices)
        self.is_computing = False
        self.executor_seconds = time.perf_counter() - begin
        tokens: list[int] = chosen.tokens.tolist()
        requests = [decodes[row] for row in rows]
        for row, token in zip(rows, publish_decodes(requests, rows, results, self._scheduler), strict=True):
            tokens[row] = token if isinstance(token, int) else 0
        if following is None:
            self._inputs.move()
        self._inputs.take(tokens)
        if following is not None and is_wrong:
            following = self._queue(following.plan, following.step, following.choices, following.left, is_fed=False)
        self._queued = following
        return queued.plan._replace(decodes=requests)

    def forget(self) -> None:
        """Ignore the step under way."""
        self._queued, self.is_computing = None, False

    def _follow(self, queued: _Queued) -> _Queued | None:
        """Queue the step after this one; None if it is not known before this one's tokens are."""
        plan = self._scheduler.schedule_ahead(queued.plan.decodes) if queued.left > 1 else None
        if plan is None:
            return None
        queued.step = queued.step.copied()
        self._inputs.move()
        choices = [choice.later(1) for choice in queued.choices]
        return self._queue(plan, self._inputs.fill(plan), choices, queued.left - 1, is_fed=True)

    def _queue(self, plan: StepPlan, step: Step, choices: Sequence[RowChoice], left: int, *, is_fed: bool) -> _Queued:
        self.is_computing = True
        read = self._executor.queue(step, least_wanted(choices), RowChoices.of(choices), is_fed=is_fed)
        self.is_computing = False
        return _Queued(plan, step, choices, left, read)


def _rows_in_place(requests: Sequence[SampledRequest]) -> list[int]:
    """The rows of those that still decode."""
    return [row for row, request in enumerate(requests) if request.decoding.place is not None and not request.finished]
