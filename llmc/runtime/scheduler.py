"""Decide which tokens of which requests the next step computes. Knows no model, only counts and blocks.

There are no separate prefill and decode phases: a step has one budget of tokens; running requests that need a single
token come first, then chunks of prompts, then new requests, each in order of arrival. When the pool runs dry the
youngest request gives its blocks back and later computes its tokens again (preemption by recompute, as in Kwon et
al. 2023, "PagedAttention").
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from llmc.program import Limits
from llmc.runtime.block_pool import BlockPool
from llmc.runtime.request import Request


@dataclass(frozen=True)
class Chunk:
    """`count` tokens of a request from position `start` on; logits are wanted of the last `logit_rows` of them."""

    request: Request
    start: int
    count: int
    logit_rows: int


class Scheduler:
    """Requests in order of arrival, waiting or running (holding blocks), and the pool they share.

    max_step_tokens: a lower budget of tokens a step than the engine's limit.
    """

    def __init__(self, limits: Limits, pool: BlockPool, max_step_tokens: int | None = None) -> None:
        self._limits = limits
        self._pool = pool
        self._budget = min(limits.max_batch_tokens, max_step_tokens or limits.max_batch_tokens)
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []

    @property
    def idle(self) -> bool:
        """Whether no request is left."""
        return not self._waiting and not self._running

    def add(self, request: Request) -> None:
        """Queue a request of at most max_model_len tokens; the pool must hold at least one of that length."""
        self._waiting.append(request)

    def remove(self, request: Request) -> None:
        """Forget a request and free its blocks at once; one that is gone already is no error."""
        if request in self._running:
            self._running.remove(request)
        elif request in self._waiting:
            self._waiting.remove(request)
        self._free(request)

    def schedule(self) -> tuple[Chunk, ...]:
        """The next step's chunks, with blocks for their tokens. Empty only if no request is left.

        The caller computes them and then sets each request's `computed`.
        """
        step = _Step(self._budget, self._limits.max_logit_rows)
        preempted = False
        for request in sorted(self._running, key=lambda r: r.pending > 1):
            if request in self._running:
                preempted |= self._extend(request, step)
        while self._waiting and not preempted and len(self._running) < self._limits.max_sequences:
            request = self._waiting[0]
            if step.fitting(request) == 0 or self._promised() + self._blocks_for(len(request.tokens)) > self._pool.free:
                break
            self._running.append(self._waiting.popleft())
            self._extend(request, step)
        return tuple(step.chunks.values())

    def _extend(self, request: Request, step: _Step) -> bool:
        """Give the request's next tokens blocks and a place in the step; true if a request had to be preempted."""
        count = step.fitting(request)
        if count == 0:
            return False
        missing = self._blocks_for(request.computed + count) - len(request.blocks)
        preempted = False
        while missing > self._pool.free:
            victim = self._running[-1]
            self._preempt(victim, step)
            preempted = True
            if victim is request:
                return True
        request.blocks += self._pool.allocate(max(0, missing))
        step.add(request, count)
        return preempted

    def _preempt(self, victim: Request, step: _Step) -> None:
        self._running.remove(victim)
        self._waiting.appendleft(victim)
        self._free(victim)
        step.drop(victim)

    def _free(self, request: Request) -> None:
        self._pool.release(request.blocks)
        request.blocks = []
        request.computed = 0

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._limits.block_size)

    def _promised(self) -> int:
        """Blocks that running requests still need for the tokens they have: a new request must not take those."""
        return sum(max(0, self._blocks_for(len(r.tokens)) - len(r.blocks)) for r in self._running)


class _Step:
    """A step being filled: chunks by request, and what is left of its tokens and logit rows."""

    def __init__(self, tokens: int, logit_rows: int) -> None:
        self.chunks: dict[int, Chunk] = {}
        self._tokens = tokens
        self._logit_rows = logit_rows

    def fitting(self, request: Request) -> int:
        """How many of the request's pending tokens still fit."""
        count = min(request.pending, self._tokens)
        if request.every_logit:
            return min(count, self._logit_rows)
        # Without a row left for its logits the last token has to wait.
        return count if request.logit_rows(count) <= self._logit_rows else count - 1

    def add(self, request: Request, count: int) -> None:
        rows = request.logit_rows(count)
        self.chunks[id(request)] = Chunk(request, request.computed, count, rows)
        self._tokens -= count
        self._logit_rows -= rows

    def drop(self, request: Request) -> None:
        chunk = self.chunks.pop(id(request), None)
        if chunk is not None:
            self._tokens += chunk.count
            self._logit_rows += chunk.logit_rows
