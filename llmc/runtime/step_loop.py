"""The runtime's loop: schedule → execute → sample → publish, one step at a time."""

from __future__ import annotations

from collections.abc import Sequence

from llmc.program import Limits
from llmc.runtime.block_pool import BlockPool
from llmc.runtime.executors.executor import Best, Executor, GreedyExecutor, Logits
from llmc.runtime.request import Request
from llmc.runtime.scheduler import Chunk, Scheduler
from llmc.runtime.step_inputs import StepInputs


class StepLoop:
    """Runs requests together on one executor; each step serves every request that fits in it.

    blocks: of the executor's KV cache. max_step_tokens: a lower budget of tokens a step than the engine's limit.
    """

    def __init__(self, executor: Executor, limits: Limits, blocks: int, max_step_tokens: int | None = None) -> None:
        self._executor = executor
        self._inputs = StepInputs(limits)
        self.pool = BlockPool(blocks)
        self._scheduler = Scheduler(limits, self.pool, max_step_tokens)

    def add(self, request: Request) -> None:
        """Queue a request."""
        self._scheduler.add(request)

    def remove(self, request: Request) -> None:
        """Drop a request, finished or not, and free its blocks."""
        self._scheduler.remove(request)

    def run(self, requests: Sequence[Request]) -> None:
        """Step until all of these are finished; others in the queue advance too."""
        while not all(request.finished for request in requests):
            self.step()

    def step(self) -> None:
        """One step of whatever the scheduler chooses. The logits stay on a device where nobody needs them."""
        chunks = self._scheduler.schedule()
        step = self._inputs.fill(chunks)
        executor = self._executor
        is_greedy = all(chunk.request.greedy for chunk in chunks if chunk.logit_rows)
        if is_greedy and isinstance(executor, GreedyExecutor):
            self._publish(chunks, executor.best(step))
        else:
            self._publish(chunks, executor.step(step))

    def _publish(self, chunks: Sequence[Chunk], results: Logits | Best) -> None:
        row = 0
        for chunk in chunks:
            request, first = chunk.request, row
            row += chunk.logit_rows
            request.computed += chunk.count
            if chunk.logit_rows and isinstance(results, Best):
                request.receive_best(int(results.tokens[first]), float(results.logits[first]))
            elif chunk.logit_rows and not isinstance(results, Best):
                request.receive(request.computed - chunk.logit_rows, results[first:row])
            if request.finished:
                self._scheduler.remove(request)
