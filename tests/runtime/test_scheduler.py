"""Properties of the scheduler, without a model: budgets, blocks, progress, order, preemption."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.program import Limits
from llmc.runtime.block_pool import BlockPool
from llmc.runtime.request import Request
from llmc.runtime.scheduler import Chunk, Scheduler

NO_LOGITS = np.empty((0, 0), np.float32)


class Counted(Request):
    """Appends token 0 for each row of logits until it has `output` of them; a scoring request appends nothing."""

    def __init__(self, prompt: int, output: int, every_logit: bool = False) -> None:
        super().__init__([0] * prompt, every_logit=every_logit)
        self.prompt = prompt
        self.length = prompt + (0 if every_logit else output)
        self.rows = 0

    def receive(self, start: int, logits: npt.NDArray[np.float32]) -> None:
        self.rows = max(self.rows, start + 1)
        if not self.every_logit:
            self.tokens.append(0)
        self.finished = len(self.tokens) == self.length and (not self.every_logit or self.rows == self.length)


@dataclass
class Run:
    """A scheduler and its pool, stepped without a model."""

    scheduler: Scheduler
    pool: BlockPool
    limits: Limits
    steps: int = 0

    def step(self, requests: Sequence[Request]) -> tuple[Chunk, ...]:
        chunks = self.scheduler.schedule()
        self.check(chunks, requests)
        for chunk in chunks:
            request = chunk.request
            request.computed += chunk.count
            for i in range(chunk.logit_rows):
                request.receive(request.computed - chunk.logit_rows + i, NO_LOGITS)
            if request.finished:
                self.scheduler.remove(request)
        self.steps += 1
        return chunks

    def check(self, chunks: tuple[Chunk, ...], requests: Sequence[Request]) -> None:
        assert chunks, "a step without work while requests are left"
        assert sum(chunk.count for chunk in chunks) <= self.limits.max_batch_tokens
        assert sum(chunk.logit_rows for chunk in chunks) <= self.limits.max_logit_rows
        assert len(chunks) <= self.limits.max_sequences
        assert len({id(chunk.request) for chunk in chunks}) == len(chunks)
        for chunk in chunks:
            assert chunk.start == chunk.request.computed
            assert 1 <= chunk.count <= chunk.request.pending
            assert chunk.logit_rows == chunk.request.logit_rows(chunk.count)
            assert len(chunk.request.blocks) * self.limits.block_size >= chunk.start + chunk.count
        held = [block for request in requests for block in request.blocks]
        assert len(held) == len(set(held)), "a block belongs to two requests"
        assert len(held) + self.pool.free == self.pool.count
        assert sum(bool(request.blocks) for request in requests) <= self.limits.max_sequences


def run_of(limits: Limits, blocks: int, max_step_tokens: int | None = None) -> Run:
    pool = BlockPool(blocks)
    return Run(Scheduler(limits, pool, max_step_tokens), pool, limits)


sizes = st.builds(Counted, st.integers(1, 20), st.integers(1, 12), st.booleans())


@settings(max_examples=200, deadline=None)
@given(
    st.lists(sizes, min_size=1, max_size=9),
    st.integers(1, 16),
    st.integers(1, 4),
    st.integers(1, 6),
    st.integers(8, 20),
)
def test_every_request_finishes_within_the_limits(
    requests: list[Counted], budget: int, sequences: int, rows: int, blocks: int
) -> None:
    limits = Limits(budget, sequences, rows, max_model_len=32, block_size=4)
    run = run_of(limits, blocks)
    waiting = list(requests)
    while waiting or not run.scheduler.idle:
        if waiting and (run.scheduler.idle or run.steps % 3 == 0):
            run.scheduler.add(waiting.pop(0))
        run.step(requests)
        assert run.steps < 5000, "no progress"
    assert run.pool.free == blocks
    assert all(len(r.tokens) == r.length for r in requests)


def test_decodes_come_first_then_the_prompt_in_chunks() -> None:
    run = run_of(Limits(6, 4, 4, 32, 4), 24)
    decoding, prompt = Counted(2, 20), Counted(13, 5)
    run.scheduler.add(decoding)
    run.step([decoding, prompt])
    run.scheduler.add(prompt)
    counts = [[(c.request is prompt, c.count) for c in run.step([decoding, prompt])] for _ in range(4)]
    assert counts[:3] == [[(False, 1), (True, 5)], [(False, 1), (True, 5)], [(False, 1), (True, 3)]]
    assert counts[3] == [(False, 1), (True, 1)]


def test_the_first_to_arrive_is_the_first_to_start() -> None:
    run = run_of(Limits(8, 2, 4, 32, 4), 8)
    requests = [Counted(3, 3) for _ in range(5)]
    for request in requests:
        run.scheduler.add(request)
    order: list[Request] = []
    while not run.scheduler.idle:
        order += [c.request for c in run.step(requests) if c.start == 0]
    assert order == requests


def test_the_youngest_gives_way_and_computes_again() -> None:
    run = run_of(Limits(16, 4, 4, 16, 4), 5)
    old, young = Counted(7, 9), Counted(7, 9)
    run.scheduler.add(old)
    run.scheduler.add(young)
    starts: list[tuple[bool, int, int]] = []
    while not run.scheduler.idle:
        starts += [(c.request is young, c.start, c.count) for c in run.step([old, young])]
    assert [s for s in starts if not s[0] and s[1] == 0] == [(False, 0, 7)], "the older one ran through"
    restarts = [s for s in starts if s[0] and s[1] == 0]
    assert len(restarts) == 2 and restarts[1][2] > 7, "the younger one read prompt and output again"


def test_a_new_request_waits_until_its_whole_prompt_has_room() -> None:
    run = run_of(Limits(4, 4, 4, 32, 4), 8)
    first, second = Counted(20, 4), Counted(16, 4)
    run.scheduler.add(first)
    run.scheduler.add(second)
    chunks = run.step([first, second])
    assert [c.request for c in chunks] == [first]
    assert not second.blocks


def test_a_removed_request_frees_its_blocks_at_once() -> None:
    run = run_of(Limits(16, 4, 4, 32, 4), 8)
    running, waiting = Counted(9, 4), Counted(30, 1)
    run.scheduler.add(running)
    run.scheduler.add(waiting)
    run.step([running, waiting])
    run.scheduler.remove(running)
    run.scheduler.remove(waiting)
    run.scheduler.remove(waiting)
    assert run.scheduler.idle
    assert run.pool.free == 8
