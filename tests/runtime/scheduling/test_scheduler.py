"""Scheduler, pool and prefix cache without a model: budgets, blocks, order, preemption, forks, deadlines."""

from __future__ import annotations

import random
import weakref
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.program import Limits
from llmc.runtime.requests.generation_request import Priority
from llmc.runtime.requests.request import Request
from llmc.runtime.scheduling.deadlines import Deadlines
from tests.runtime.model_free import PROMPT, Counted, Run


def counted(prompt: int, output: int, **options: Any) -> Counted:
    return Counted(PROMPT[:prompt], output, **options)


def test_decodes_come_first_then_the_prompt_in_chunks() -> None:
    run = Run(Limits(6, 4, 4, 32, 4), 24)
    decoding, prompt = counted(2, 20), counted(13, 5)
    run.add(decoding)
    run.step()
    run.add(prompt)
    counts = [[(c.request is prompt, c.tokens) for c in run.step()] for _ in range(4)]
    assert counts[:3] == [[(False, 1), (True, 5)], [(False, 1), (True, 5)], [(False, 1), (True, 3)]]
    assert counts[3] == [(False, 1), (True, 1)]


def test_a_step_is_planned_ahead_for_the_same_decodes_only() -> None:
    run = Run(Limits(8, 2, 4, 32, 4), 5)
    requests = [counted(3, 8), counted(4, 8)]
    for request in requests:
        run.add(request)
    run.step()
    run.step()
    scheduler, decodes = run.scheduler, run.scheduler.schedule().decodes
    assert decodes == requests and [len(request.standing.blocks) for request in requests] == [2, 2]
    assert scheduler.schedule_ahead(decodes[:1]) is None
    scheduler.add(counted(2, 2))
    ahead = scheduler.schedule_ahead(decodes)
    assert ahead is not None and ahead.decodes == decodes, "there is no seat for the one that waits"
    scheduler.remove(decodes[1])
    assert scheduler.schedule_ahead(decodes) is None
    assert scheduler.schedule_ahead(decodes[:1]) is None, "the one that waits may start"


def test_the_first_to_arrive_is_the_first_to_start() -> None:
    run = Run(Limits(8, 2, 4, 32, 4), 8)
    requests = [counted(3, 3) for _ in range(5)]
    for request in requests:
        run.add(request)
    order: list[Request] = []
    while not run.scheduler.idle:
        order += [c.request for c in run.step() if c.start == 0]
    assert order == requests


def test_premium_requests_overtake_free_ones_until_those_have_aged() -> None:
    now = 0.0
    run = Run(Limits(8, 1, 4, 32, 4), 8, clock=lambda: now)
    free = counted(3, 2, arrived=0.0)
    premium = [counted(3, 2, priority=Priority.PREMIUM, arrived=float(i)) for i in range(1, 8)]
    run.add(premium[0])
    run.step()
    run.add(free)
    order: list[Request] = []
    for request in premium[1:]:
        run.add(request)
    while not run.scheduler.idle:
        now += 2.0
        order += [c.request for c in run.step() if c.start == 0]
    place = order.index(free)
    assert 2 <= place < 6, "overtaken, but not by all"
    assert [r for r in order if r is not free] == premium[1:]


def test_of_two_half_computed_prompts_the_urgent_one_goes_on_first() -> None:
    """Rows of logits hold the first one up, so that the second starts beside it."""
    run = Run(Limits(8, 2, 2, 32, 4), 16)
    scored, premium = counted(10, 0, every_logit=True), counted(20, 1, priority=Priority.PREMIUM)
    run.add(scored)
    run.step()
    run.add(premium)
    steps = [[(c.request is premium, c.tokens) for c in run.step()] for _ in range(2)]
    assert steps == [[(False, 2), (True, 6)], [(True, 8)]]


def test_the_youngest_gives_way_and_computes_again() -> None:
    run = Run(Limits(16, 4, 4, 16, 4), 5)
    old, young = counted(7, 9), counted(7, 9)
    run.add(old)
    run.add(young)
    starts: list[tuple[bool, int, int]] = []
    while not run.scheduler.idle:
        starts += [(c.request is young, c.start, c.tokens) for c in run.step()]
    assert [s for s in starts if not s[0] and s[1] == 0] == [(False, 0, 7)], "the older one ran through"
    restarts = [s for s in starts if s[0] and s[1] == 0]
    assert len(restarts) == 2 and restarts[1][2] > 7, "the younger one read prompt and output again"
    assert run.scheduler.preemptions == 1
    assert young.tokens == young.expected()


def test_a_free_request_gives_way_to_a_premium_one() -> None:
    run = Run(Limits(16, 4, 4, 16, 4), 5)
    free, premium = counted(7, 9), counted(7, 9, priority=Priority.PREMIUM)
    run.add(free)
    run.add(premium)
    finished: list[Request] = []
    while not run.scheduler.idle:
        run.step()
        finished += [r for r in (free, premium) if r.finished and r not in finished]
    assert finished == [premium, free]


def test_a_new_request_waits_until_its_whole_prompt_has_room() -> None:
    run = Run(Limits(4, 4, 4, 32, 4), 8)
    first, second = counted(20, 4), counted(16, 4)
    run.add(first)
    run.add(second)
    chunks = run.step()
    assert [c.request for c in chunks] == [first]
    assert not second.standing.blocks


def test_a_removed_request_frees_its_blocks_at_once() -> None:
    run = Run(Limits(16, 4, 4, 32, 4), 8)
    running, waiting = counted(9, 4), counted(30, 1)
    run.add(running)
    run.add(waiting)
    run.step()
    run.scheduler.remove(running)
    run.scheduler.remove(waiting)
    run.scheduler.remove(waiting)
    assert run.scheduler.idle
    assert run.pool.free == 8


def test_the_next_turn_finds_the_last_answer() -> None:
    run = Run(Limits(16, 4, 4, 32, 4), 8)
    first = counted(9, 5, salt=b"")
    run.add(first)
    while not first.finished:
        run.step()
    following = Counted([*first.tokens, 5, 6], 3, salt=b"")
    stranger = Counted([*first.tokens, 5, 6], 3, salt=b"other")
    for request in (following, stranger):
        run.add(request)
        while not request.finished:
            run.step()
        assert request.tokens == request.expected()
    # 14 tokens, of which the last was never read: three full blocks of four.
    assert (following.standing.cached_tokens, stranger.standing.cached_tokens) == (12, 0)
    assert (run.scheduler.prefix_cache.queries, run.scheduler.prefix_cache.hits) == (9 + 16 + 16, 12)


def test_every_answer_to_one_prompt_is_found() -> None:
    """The answers' blocks lie folded under the prompt's last one until somebody has matched that."""
    run = Run(Limits(32, 4, 4, 64, 4), 60)
    answers = [Counted(PROMPT[:9], 14, variant=variant, salt=b"") for variant in range(3)]
    for request in answers:
        run.add(request)
        while not request.finished:
            run.step()
    for request in reversed(answers):
        following = Counted([*request.tokens, 5], 2, salt=b"")
        run.add(following)
        while not following.finished:
            run.step()
        assert following.standing.cached_tokens == 20, "five full blocks of the 22 tokens that were read"
        assert following.tokens == following.expected()
    assert run.pool.used == 0 and run.pool.cached == 2 + 3 * (3 + 1), "the prompt's blocks are there once"


def test_blocks_that_nobody_asked_for_are_lost_from_their_end() -> None:
    run = Run(Limits(32, 4, 4, 64, 4), 12)
    first = Counted(PROMPT[:9], 14, salt=b"")
    stranger = Counted([5] * 30, 2, salt=b"")
    for request in (first, stranger):
        run.add(request)
        while not request.finished:
            run.step()
    again = Counted([*first.tokens, 5], 1, salt=b"")
    run.add(again)
    while not again.finished:
        run.step()
    assert again.standing.cached_tokens == 16, "one of five blocks was needed"


@pytest.mark.parametrize("prompt", [5, 8])
def test_a_prompt_that_is_cached_computes_its_last_block(prompt: int) -> None:
    """Also where that is not full."""
    run = Run(Limits(16, 4, 4, 32, 4), 8)
    for expected in (0, 4):
        request = counted(prompt, 2, salt=b"")
        run.add(request)
        while not request.finished:
            run.step()
        assert request.standing.cached_tokens == expected
        assert request.tokens == request.expected()


@pytest.mark.parametrize("prompt", [8, 9, 10])
@pytest.mark.parametrize("kind", [{}, {"forks": 2}, {"every_logit": True}])
def test_what_broken_logits_came_from_is_not_found(prompt: int, kind: dict[str, Any]) -> None:
    """The budget ends with the prompt, a token before it, and two."""
    run = Run(Limits(4, 4, 4, 32, 4), 8)
    broken = counted(prompt, 2, salt=b"", **kind)
    run.breaks_at[broken] = 3
    run.add(broken)
    run.finish()
    assert broken.error is not None
    assert run.pool.free == 8 and run.pool.cached == 0
    again = counted(prompt, 2, salt=b"", **kind)
    run.add(again)
    run.finish()
    assert again.error is None and again.standing.cached_tokens == 0 and again.tokens == again.expected()


@pytest.mark.parametrize("steps", [1, 2])
def test_what_no_logits_have_followed_is_not_found(steps: int) -> None:
    """A request that is aborted before its first token, the last of whose prompt waits for its step."""
    run = Run(Limits(4, 4, 4, 32, 4), 8)
    left = counted(9, 2, salt=b"")
    run.breaks_at[left] = 3
    run.add(left)
    for _ in range(steps):
        run.step()
    assert left.computed == 4 * steps
    left.end()
    run.scheduler.remove(left)
    assert run.pool.free == 8 and run.pool.cached == 0


def test_what_came_before_broken_logits_is_found() -> None:
    run = Run(Limits(16, 4, 4, 32, 4), 8)
    broken = counted(9, 9, salt=b"")
    run.breaks_at[broken] = 13
    run.add(broken)
    run.finish()
    assert broken.error is not None and len(broken.tokens) == 14
    following = counted(9, 2, salt=b"")
    run.add(following)
    run.finish()
    assert following.standing.cached_tokens == 8 and following.tokens == following.expected()


def test_forks_share_blocks_until_they_write() -> None:
    run = Run(Limits(16, 4, 4, 32, 4), 20)
    parent = counted(9, 6, forks=2)
    run.add(parent)
    run.step()
    assert [run.pool.holders(b) for b in parent.standing.blocks] == [3, 3, 3]
    run.step()
    assert [run.pool.holders(b) for b in parent.standing.blocks] == [3, 3, 1], "each copies the unfinished block"
    while not run.scheduler.idle:
        run.step()
    assert all(r.tokens == r.expected() for r in (parent, *parent.children))


def test_forks_without_a_seat_wait() -> None:
    run = Run(Limits(16, 2, 4, 32, 4), 8)
    parent = counted(9, 6, forks=4)
    run.add(parent)
    while not run.scheduler.idle:
        run.step()
    assert all(r.finished and r.tokens == r.expected() for r in (parent, *parent.children))


def test_deadlines_are_told_once() -> None:
    now = 0.0
    run = Run(Limits(16, 2, 4, 32, 4), 8, clock=lambda: now)
    late, done = counted(5, 9, deadline=3.0), counted(5, 1, deadline=3.0)
    run.add(late)
    run.add(done)
    run.step()
    assert run.scheduler.expired() == []
    now = 3.0
    assert run.scheduler.expired() == [late]
    assert run.scheduler.expired() == []


def test_deadlines_hold_nobody_who_has_ended() -> None:
    run = Run(Limits(16, 2, 4, 32, 4), 8, clock=lambda: 0.0)
    staying = counted(5, 20, deadline=5.0)
    run.add(staying)
    gone = []
    for number in range(10):
        ended, aborted = counted(5, 1, deadline=86400.0 - number), counted(5, 9, deadline=86400.0)
        gone += [weakref.ref(ended), weakref.ref(aborted)]
        run.add(ended)
        run.add(aborted)
        run.step()
        run.scheduler.remove(aborted)
        assert ended.finished and run.scheduler.expired() == []
        del run.requests[1:]
    del ended, aborted
    run.step()
    assert not any(reference() for reference in gone)
    assert len(run.scheduler._deadlines._heap) <= 2


def test_deadlines_pass_in_order_whoever_is_dropped() -> None:
    chance = random.Random(0)
    deadlines, kept = Deadlines(), list[Request]()
    for _ in range(500):
        request = counted(1, 1, deadline=float(chance.randrange(50)))
        deadlines.watch(request)
        kept.append(request)
        if chance.random() < 0.7:
            deadlines.drop(kept.pop(chance.randrange(len(kept))))
    for now in range(50):
        found = deadlines.passed(float(now))
        assert set(found) == {request for request in kept if request.deadline == now}
    assert not deadlines


@settings(max_examples=60)
@given(st.integers(1, 20), st.integers(1, 6), st.integers(1, 16))
def test_rows_bound_the_chunks_of_scoring_requests(prompt: int, rows: int, budget: int) -> None:
    run = Run(Limits(budget, 2, rows, 32, 4), 8)
    request = counted(prompt, 0, every_logit=True)
    run.add(request)
    while not run.scheduler.idle:
        run.step()
    assert request.rows == prompt
