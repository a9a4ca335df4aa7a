"""Blocks of layers that do not see everything: how many a long sequence holds, and what of them is found again."""

from __future__ import annotations

import numpy as np
import pytest

from llmc.program import TREE_REACH, Limits, Nearest
from llmc.runtime.loop.publish import publish
from llmc.runtime.scheduling.block_pool import BlockPool
from llmc.runtime.scheduling.group_pool import GroupPool
from llmc.runtime.scheduling.scheduler import Scheduler
from llmc.runtime.scheduling.step_plan import StepPlan
from llmc.runtime.speculation.speculation import Speculation
from tests.runtime.model_free import Checksums, Counted
from tests.runtime.speculation.guesses import Guesses, Open

LIMITS = Limits(2048, 2, 64, max_model_len=32768, block_size=16)
POLICY = Nearest(512, None)
PROMPT = [i % 97 for i in range(32600)]


def take_step(scheduler: Scheduler) -> StepPlan:
    """The next step, after which each request is given token 0."""
    plan = scheduler.schedule()
    rows = len(plan.decodes) + sum(chunk.logit_rows for chunk in plan.chunks)
    publish(plan, Checksums(np.zeros((rows, 1), np.float32)), scheduler, lambda *moved: None)
    return plan


def serve(scheduler: Scheduler, window: GroupPool, request: Counted) -> None:
    """Every step of the request, which is alone."""
    scheduler.add(request)
    while not scheduler.idle:
        plan = scheduler.schedule()
        tokens, rows = (plan.chunks[0].tokens, plan.chunks[0].logit_rows) if plan.chunks else (1, 1)
        assert window.stats.used * 16 <= 512 + tokens + 16, "more than window, chunk and a block"
        publish(plan, Checksums(np.zeros((rows, 1), np.float32)), scheduler, lambda *moved: None)


@pytest.fixture
def window() -> GroupPool:
    return GroupPool(POLICY, POLICY.pool_blocks(LIMITS, 4096), LIMITS)


def test_32k_hold_window_chunk_and_a_block_and_are_found_again(window: GroupPool) -> None:
    scheduler = Scheduler(LIMITS, BlockPool(4096), groups=(window,))
    first, again = (Counted(PROMPT, 100, salt=b"") for _ in range(2))
    serve(scheduler, window, first)
    assert first.standing.cached_tokens == 0
    serve(scheduler, window, again)
    assert again.standing.cached_tokens == (len(PROMPT) - 1) // 16 * 16
    turn = Counted([*first.tokens, 1, 2, 3], 5, salt=b"")
    serve(scheduler, window, turn)
    assert turn.standing.cached_tokens == (len(first.tokens) - 1) // 16 * 16, "the answer is found, too"


def test_a_prefix_without_its_window_is_found_as_far_as_it_has_one(window: GroupPool) -> None:
    """Blocks long behind the window have gone to others: the first group alone brings nobody there."""
    scheduler = Scheduler(LIMITS, BlockPool(4096), groups=(window,))
    serve(scheduler, window, Counted(PROMPT, 5, salt=b""))
    parts = Counted([*PROMPT[:1000], 5, 5, 5], 5, salt=b"")
    serve(scheduler, window, parts)
    assert parts.standing.cached_tokens == 0
    serve(scheduler, window, Counted([*PROMPT[:1000], 6], 5, salt=b""))
    again = Counted([*PROMPT[:1000], 7], 5, salt=b"")
    serve(scheduler, window, again)
    assert again.standing.cached_tokens == 992


def test_one_sequence_always_fits() -> None:
    for policy in (POLICY, Nearest(None, 1000), Nearest(1, None), Nearest(40_000, 7)):
        whole = LIMITS.blocks_for(LIMITS.max_model_len)
        assert policy.sequence_blocks(LIMITS, LIMITS.max_batch_tokens) <= policy.pool_blocks(LIMITS, whole) <= whole
        assert policy.pool_blocks(LIMITS, 0) == 0


def test_a_short_sequence_has_what_a_token_and_its_drafts_see_beginning_in_any_row() -> None:
    # 18 rows and the 63 that a tree may hide span 6 blocks of 16 at the most; one row more would span 7.
    limits = Limits(32, 3, 3, max_model_len=4096, block_size=16)
    assert Nearest(18, None).pool_blocks(limits, 440) == 3 * 6 + limits.blocks_for(32 + 63)


def test_what_was_found_does_not_keep_a_request_from_starting() -> None:
    """What it begins on is part of the most that it holds, not beside it."""
    limits = Limits(2, 1, 1, max_model_len=32, block_size=4)
    policy = Nearest(7, 12)
    window = GroupPool(policy, policy.sequence_blocks(limits, 2), limits)
    scheduler = Scheduler(limits, BlockPool(8), groups=(window,))
    prompt = PROMPT[:9]
    for more in ((), (1, 2, 3, 4, 5, 6, 7, 8)):
        request = Counted([*prompt, *more], 3, salt=b"")
        scheduler.add(request)
        while not scheduler.idle:
            assert take_step(scheduler), "nothing else runs, and it does not start"
        assert request.standing.cached_tokens == (8 if more else 0)


@pytest.mark.parametrize("drafts", [0, 5])
def test_short_sequences_find_room_where_memory_holds_few_long_ones(drafts: int) -> None:
    """Also with the rows behind its window that a request keeps while drafts come."""
    limits = Limits(256, 32, 256, max_model_len=131072, block_size=16)
    policy, blocks, slack = Nearest(64, None), 3 * 131072 // 16, TREE_REACH if drafts else 0
    speculation = Speculation(lambda: Guesses(lambda _: 0, 97), drafts, Open) if drafts else None
    window = GroupPool(policy, policy.pool_blocks(limits, blocks), limits, slack)
    scheduler = Scheduler(limits, BlockPool(blocks), groups=(window,), speculation=speculation)
    requests = [Counted(PROMPT[:200], 100, salt=None) for _ in range(24)]
    for request in requests:
        scheduler.add(request)
    together = 0
    while not scheduler.idle:
        plan = take_step(scheduler)
        if speculation is not None:
            speculation.observe(plan)
        together = max(together, scheduler.running)
    assert together == len(requests) and not scheduler.preemptions
    assert speculation is None or speculation.stats.draft_tokens


def test_beginnings_in_common_are_found_while_all_seats_are_taken() -> None:
    """What lies behind a window goes before the blocks that the next request begins behind."""
    limits = Limits(32, 4, 4, max_model_len=512, block_size=4)
    policy, blocks = Nearest(16, None), 4 * 512 // 4
    window = GroupPool(policy, policy.pool_blocks(limits, blocks), limits)
    scheduler = Scheduler(limits, BlockPool(blocks), groups=(window,))
    begins = [PROMPT[start : start + 80] for start in range(4)]
    for number in range(40):
        scheduler.add(Counted([*begins[number % 4], *PROMPT[number : number + 40]], 40, salt=b""))
    while not scheduler.idle:
        take_step(scheduler)
    assert scheduler.prefix_cache.hits > 0.5 * scheduler.prefix_cache.queries
