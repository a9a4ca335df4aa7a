"""Requests that read their prompts again, in pools that have no room for all of them."""

from __future__ import annotations

import pytest

from llmc.program import KVzip, Limits, Nearest
from tests.runtime.model_free import PROMPT, Counted, Run
from tests.runtime.scheduling.test_second_tier import counted, finish

LIMITS = Limits(16, 4, 4, max_model_len=64, block_size=4)
# The first 28 of 33 tokens are read again in parts of 8, after a cue of 8: 44 tokens, in 11 blocks.
POLICIES = (KVzip(budget=8, every=4, sinks=0, block=4, chunk=8), Nearest(5))
AGAIN = 8 + 3 * 16 - 4


@pytest.mark.parametrize("salt", [None, b""])
def test_a_request_starts_when_its_reading_has_room(salt: bytes | None) -> None:
    """18 blocks hold two prompts, but not a prompt and another one with a part."""
    run = Run(LIMITS, 18, policies=POLICIES, spare=64)
    requests = [counted(begin, 33, 1, salt=salt) for begin in range(4)]
    assert finish(run, *requests) == 4 * (33 + AGAIN) and not run.scheduler.preemptions
    assert run.groups[0].dropped_rows == 4 * 20


@pytest.mark.parametrize("spare", [6, *range(11, 17)])
def test_rows_that_others_hold_are_copied_into_room_that_was_counted(spare: int) -> None:
    """The others begin on the first request's prefix, which each must own before its scores start."""
    run = Run(LIMITS, 200, policies=POLICIES, spare=spare)
    first = counted(0, 33, 1)
    finish(run, first)
    finish(run, *(Counted([*PROMPT[:24], *range(begin, begin + 9)], 1, salt=b"") for begin in range(3)))
    assert not run.scheduler.preemptions and run.groups[0].dropped_rows == 4 * 20


def test_a_reading_goes_on_after_a_swap() -> None:
    """The answer of the first request grows into the blocks of the second one, while that reads again."""
    run = Run(LIMITS, 22, policies=POLICIES, spare=64, tier_blocks=200)
    first, second = counted(0, 9, 50, salt=None), counted(1, 33, 20, salt=None)
    run.add(first)
    while first.computed < 40:
        run.step()
    run.add(second)
    while not run.scheduler.preemptions:
        assert not run.scheduler.idle, "nothing was preempted"
        reading = second.standing.reading
        run.step()
    assert reading is not None and reading.scored is not None and not second.standing.is_seated
    left = 59 - 1 - first.computed + sum(map(len, reading.parts)) + 33 - 28 + 19
    computed = reading.scored - reading.end
    assert finish(run) == left - computed
    assert second.tokens == second.expected() and run.groups[0].dropped_rows == 20


@pytest.mark.parametrize("tier_blocks", [None, 3, 200])
@pytest.mark.parametrize(("blocks", "spare"), [(16, 64), (20, 5), (64, 2)])
@pytest.mark.parametrize("salt", [None, b""])
def test_requests_that_give_way_all_end(tier_blocks: int | None, blocks: int, spare: int, salt: bytes | None) -> None:
    run = Run(LIMITS, blocks, policies=POLICIES, spare=spare, tier_blocks=tier_blocks)
    finish(run, *(counted(begin, 20 + 4 * begin, 25, salt=salt) for begin in range(5)), counted(1, 33, 20, salt=salt))
    assert run.scheduler.preemptions
