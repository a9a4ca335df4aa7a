"""Requests and an executor without a model, for the scheduler's tests: a cell of the cache holds what it was given.

A request's next token is a checksum of all cells before it, so a block that is shared wrongly, copied wrongly or
written by two changes what it says.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from llmc.program import Limits
from llmc.runtime.block_pool import BlockPool
from llmc.runtime.generation_request import Priority
from llmc.runtime.request import Forks, Request
from llmc.runtime.scheduler import Chunk, Scheduler, StepPlan


def next_token(tokens: Sequence[int]) -> int:
    """What the pretended model says after these tokens."""
    return (sum((i + 1) * token for i, token in enumerate(tokens)) + len(tokens)) % 97


def continuation(prompt: Sequence[int], count: int, variant: int = 0) -> list[int]:
    """The next `count` tokens; the first is moved by `variant`, so that choices differ."""
    tokens = [*prompt, (next_token(prompt) + variant) % 97]
    while len(tokens) < len(prompt) + count:
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class Counted(Request):
    """Takes tokens until it has `output` of them; a scoring request takes none.

    forks: how many others start with it when the prompt is computed. Only `variant` distinguishes them.
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
            prompt, every_logit=every_logit, priority=priority, salt=salt, arrived=arrived, deadline=deadline
        )
        self.prompt = list(prompt)
        self.output = 0 if every_logit else output
        self.variant = variant
        self.rows = 0
        self.children = [
            Counted(prompt, output, variant=i + 1, priority=priority, salt=salt, arrived=arrived) for i in range(forks)
        ]
        self._unstarted = list(self.children)

    def receive(self, start: int, logits: npt.NDArray[np.float32]) -> None:
        """`logits` has the next token in its one column."""
        self.rows = max(self.rows, start + len(logits))
        if self.output:
            is_first = len(self.tokens) == len(self.prompt)
            for request in (self, *self._unstarted):
                request.tokens.append((int(logits[-1, 0]) + (request.variant if is_first else 0)) % 97)
                request.finished = len(request.tokens) - len(request.prompt) == request.output
        else:
            self.finished = self.rows == len(self.tokens)

    def follow(self, forks: Forks) -> None:
        """Start the others."""
        for child in self._unstarted:
            if not child.finished:
                forks.fork(self, child)
        self._unstarted = []

    def expected(self) -> list[int]:
        """All tokens that it must have when it is finished."""
        return [*self.prompt, *(continuation(self.prompt, self.output, self.variant) if self.output else [])]


class Run:
    """A scheduler with a pool and a pretended cache, stepped and checked."""

    def __init__(
        self,
        limits: Limits,
        blocks: int,
        max_step_tokens: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits
        self.pool = BlockPool(blocks)
        self.scheduler = Scheduler(limits, self.pool, max_step_tokens, clock=clock)
        self.cells = np.full((blocks, limits.block_size), -1, np.int64)
        self.requests: list[Counted] = []
        self.steps = 0

    def add(self, request: Counted) -> None:
        self.requests += [request, *request.children]
        self.scheduler.add(request)

    def step(self) -> tuple[Chunk, ...]:
        """One step; checks everything that must hold before and after it."""
        plan = self.scheduler.schedule()
        chunks = tuple(plan.all_chunks())
        self._check_plan(plan, chunks)
        self.check_accounts()
        if plan.copies:
            self.cells[list(plan.copies)] = self.cells[list(plan.copies.values())]
        self._write(chunks)
        for chunk in chunks:
            request = chunk.request
            request.computed += chunk.count
            if chunk.logit_rows:
                first = request.computed - chunk.logit_rows
                rows = [[next_token(self._read(request, end + 1))] for end in range(first, request.computed)]
                request.receive(first, np.array(rows, np.float32))
                request.scored = max(request.scored, request.computed)
                request.follow(self.scheduler)
            self.scheduler.settle(request)
        self.check_accounts()
        self.steps += 1
        return chunks

    def check_accounts(self) -> None:
        """used + cached + free = all, and every holder is a request that has the block in its list."""
        held = [block for request in self.requests for block in request.blocks]
        assert [held.count(block) for block in range(self.pool.count)] == [
            self.pool.holders(block) for block in range(self.pool.count)
        ]
        assert self.pool.used + self.pool.cached + self.pool.free == self.pool.count
        assert sum(request.row is not None for request in self.requests) <= self.limits.max_sequences
        rows = [request.row for request in self.requests if request.row is not None]
        assert len(rows) == len(set(rows))
        assert not any(request.blocks for request in self.requests if request.finished), "a finished one holds blocks"

    def _check_plan(self, plan: StepPlan, chunks: tuple[Chunk, ...]) -> None:
        assert chunks or self.scheduler.idle, "a step without work while requests are left"
        assert sum(chunk.count for chunk in chunks) <= self.limits.max_batch_tokens
        assert sum(chunk.logit_rows for chunk in chunks) <= self.limits.max_logit_rows
        assert len(chunks) <= self.limits.max_sequences
        assert len({id(chunk.request) for chunk in chunks}) == len(chunks)
        written: set[int] = set()
        for chunk in chunks:
            request = chunk.request
            assert chunk.start == request.computed
            assert 1 <= chunk.count <= request.pending
            assert chunk.logit_rows == request.logit_rows(chunk.count)
            size = self.limits.block_size
            own = {request.blocks[p // size] for p in range(chunk.start, chunk.start + chunk.count)}
            assert all(self.pool.holders(block) == 1 for block in own), "a block that others hold is written"
            assert not own & written, "a block has two writers"
            written |= own

    def _write(self, chunks: tuple[Chunk, ...]) -> None:
        size = self.limits.block_size
        for chunk in chunks:
            for p in range(chunk.start, chunk.start + chunk.count):
                self.cells[chunk.request.blocks[p // size], p % size] = chunk.request.tokens[p]

    def _read(self, request: Request, count: int) -> list[int]:
        size = self.limits.block_size
        cells = self.cells[request.blocks[: -(-count // size)]].reshape(-1)[:count]
        return [int(token) for token in cells]
