"""The runtime's loop: schedule → execute → sample → publish, one step at a time."""

from __future__ import annotations

import time
from collections.abc import Sequence

from llmc.program import Limits
from llmc.runtime.block_pool import BlockPool
from llmc.runtime.executors.executor import Best, Executor, GreedyExecutor, Logits
from llmc.runtime.request import Request
from llmc.runtime.sampler import choose
from llmc.runtime.scheduler import Scheduler, StepPlan
from llmc.runtime.step_inputs import StepInputs


class StepLoop:
    """Runs requests together on one executor; each step serves every request that fits in it.

    blocks: of the executor's KV cache. max_step_tokens: a lower budget of tokens a step than the engine's limit.
    executor_seconds: of the last step, spent in the executor.
    """

    def __init__(self, executor: Executor, limits: Limits, blocks: int, max_step_tokens: int | None = None) -> None:
        self._executor = executor
        self._inputs = StepInputs(limits)
        self.pool = BlockPool(blocks)
        self.scheduler = Scheduler(limits, self.pool, max_step_tokens)
        self.executor_seconds = 0.0

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.scheduler.add(request)

    def remove(self, request: Request) -> None:
        """Drop a request, finished or not, and free its blocks."""
        self.scheduler.remove(request)

    def run(self, requests: Sequence[Request]) -> None:
        """Step until all of these are finished; others in the queue advance too."""
        while not all(request.finished for request in requests):
            self.step()

    def expire(self) -> list[Request]:
        """End the requests whose deadline has passed, and free their blocks."""
        expired = self.scheduler.expired()
        for request in expired:
            request.expire()
            self.scheduler.remove(request)
        return expired

    def step(self) -> StepPlan:
        """One step of whatever the scheduler chooses. The logits stay on a device where nobody needs them."""
        plan = self.scheduler.schedule()
        if not plan:
            return plan
        executor = self._executor
        begin = time.perf_counter()
        if plan.copies:
            executor.copy_blocks(plan.copies)
        step = self._inputs.fill(plan)
        if isinstance(executor, GreedyExecutor) and _is_greedy(plan):
            results: Logits | Best = executor.best(step)
        else:
            results = executor.step(step)
        self.executor_seconds = time.perf_counter() - begin
        self._publish(plan, results)
        return plan

    def _publish(self, plan: StepPlan, results: Logits | Best) -> None:
        """Advance every request and give it its logits, or the token that was chosen from them for it."""
        scheduler = self.scheduler
        batch: list[Request] = []
        rows: list[int] = []
        scorers: list[tuple[Request, int, int]] = []
        for row, request in enumerate(plan.decodes):
            request.computed += 1
            if request.sampler is None:
                scorers.append((request, row, row + 1))
            else:
                batch.append(request)
                rows.append(row)
        end = len(plan.decodes)
        for chunk in plan.chunks:
            request = chunk.request
            request.computed += chunk.count
            begin, end = end, end + chunk.logit_rows
            if not chunk.logit_rows:
                scheduler.settle(request)
            elif request.sampler is None:
                scorers.append((request, begin, end))
            else:
                batch.append(request)
                rows.append(begin)
        tokens = choose([request.sampler for request in batch if request.sampler is not None], results, rows)
        decodes = len(plan.decodes)
        for request, row, token in zip(batch, rows, tokens, strict=True):
            if isinstance(token, int):
                request.accept(token, results, row)
            else:
                request.fail(token)
            if request.finished or row >= decodes:
                scheduler.settle(request)
        for request, begin, end in scorers:
            assert not isinstance(results, Best), "a request that reads logits is not greedy"
            request.receive(request.computed - (end - begin), results[begin:end])
            request.scored = max(request.scored, request.computed)
            request.follow(scheduler)
            scheduler.settle(request)


def _is_greedy(plan: StepPlan) -> bool:
    """Whether every request with logits in the step only wants the likeliest token."""
    return all(r.greedy for r in plan.decodes) and all(c.request.greedy for c in plan.chunks if c.logit_rows)
