"""Snapshots of states without a model: where they are taken, who begins from them, and what becomes of them. That a
state is always that of the tokens before is checked at each step by model_free.py."""

from typing import Any

import numpy as np

from llmc.program import Limits
from tests.runtime.model_free import PROMPT, Counted, Run

LIMITS = Limits(16, 4, 4, 64, 4)


def stateful(blocks: int = 64, snapshots: int = 8, spacing: int = 8) -> Run:
    return Run(LIMITS, blocks, snapshots=snapshots, spacing=spacing)


def counted(tokens: list[int], output: int = 2, **options: Any) -> Counted:
    return Counted(tokens, output, salt=b"", **options)


def answered(run: Run, *requests: Counted) -> list[int]:
    """How many tokens each found, when all have their answers."""
    for request in requests:
        run.add(request)
    run.finish()
    assert all(request.tokens == request.expected() for request in requests)
    return [request.standing.cached_tokens for request in requests]


def used(run: Run) -> int:
    assert run.snapshots is not None
    return run.snapshots.used


def test_a_prompt_that_comes_again_begins_at_its_last_block() -> None:
    """vllm#54504, #51198: a model with states found nothing, and the counters said so of hits, too."""
    run = stateful()
    assert answered(run, counted(PROMPT[:50])) == [0]
    assert answered(run, counted(PROMPT[:50])) == [48]
    cache = run.scheduler.prefix_cache
    assert (cache.queries, cache.hits) == (100, 48)
    for _ in range(20):
        answered(run, counted(PROMPT[:50]))
    assert cache.hits > 0.9 * cache.queries
    assert used(run) == 1


def test_the_next_turn_begins_in_the_last_answer() -> None:
    run = stateful()
    first = counted(PROMPT[:22], 30)
    answered(run, first)
    # Answers have one at every second block here, the last one in the place of those before.
    assert used(run) == 2
    assert answered(run, counted([*first.tokens, 5, 6])) == [44]
    assert answered(run, counted(PROMPT[:22], 4)) == [20]


def test_the_second_that_parts_from_a_prompt_leaves_a_snapshot_where_it_does() -> None:
    """vllm#45238: the only snapshots lay behind what requests shared, so that nobody ever found one."""
    run = stateful()
    questions = [[*PROMPT[:25], *[90 + i] * 12] for i in range(4)]
    assert [answered(run, counted(each))[0] for each in questions] == [0, 0, 24, 24]


def test_blocks_slots_and_tokens_are_not_mistaken_for_each_other() -> None:
    """vllm#55600, #53142, #53912, #57267: a state was looked up by a number in another unit, and was another
    request's. Here slots, blocks, seats and positions all differ, and eight prompts come back in another order."""
    run = Run(LIMITS, 150, snapshots=20, spacing=4)
    prompts = [[i, *PROMPT[i : i + 20 + 3 * i]] for i in range(8)]
    for prompt in prompts:
        answered(run, counted(prompt))
    again = [counted(prompt) for prompt in reversed(prompts)]
    assert answered(run, *again) == [(len(r.prompt) - 1) // 4 * 4 for r in again]


def test_the_snapshot_that_was_used_longest_ago_goes_first() -> None:
    run = stateful(snapshots=2)
    first, second, third = ([i, *PROMPT[:20]] for i in range(3))
    for prompt in (first, second, first, third):
        answered(run, counted(prompt))
    assert used(run) == 2
    assert answered(run, counted(first)) == [20]
    assert answered(run, counted(second)) == [0]


def test_a_block_that_is_given_away_takes_its_snapshot_with_it() -> None:
    run = stateful(blocks=16)
    answered(run, counted(PROMPT[:30]))
    assert used(run) == 1
    answered(run, counted([9, *PROMPT[:50]]))
    assert used(run) == 1
    assert answered(run, counted(PROMPT[:30])) == [0]


def test_what_is_not_found_has_no_snapshot() -> None:
    run = stateful()
    broken = counted(PROMPT[:40])
    run.add(broken)
    run.breaks_at[broken] = 38
    run.finish()
    assert broken.error is not None and used(run) == 0
    dropped = counted(PROMPT[:40])
    run.add(dropped)
    while not used(run):
        run.step()
    run.scheduler.remove(dropped)
    assert used(run) == 0


def test_of_two_that_compute_the_same_one_snapshot_stays() -> None:
    run = stateful()
    assert answered(run, counted(PROMPT[:22]), counted(PROMPT[:22])) == [0, 0]
    assert used(run) == 2
    assert answered(run, counted(PROMPT[:22])) == [20]
    assert used(run) == 1, "who has matched the block before has seen that they are the same"


def test_forks_and_those_that_give_way_go_on_from_their_own_states() -> None:
    run = Run(Limits(8, 4, 4, 64, 4), 16, snapshots=6, spacing=4)
    answered(run, *(counted([i, *PROMPT[:20]], 20, forks=2) for i in range(3)))
    assert run.scheduler.preemptions > 0


def test_where_it_is_not_worth_it_a_step_is_what_it_was() -> None:
    """Prompts shorter than the spacing, and engines without room for snapshots."""
    for run in (stateful(spacing=64), stateful(snapshots=0)):
        request = counted(PROMPT[:14], 20)
        run.add(request)
        assert [chunk.tokens for chunk in run.step()] == [14]
        run.finish()
        assert used(run) == 0
        assert answered(run, counted(PROMPT[:14])) == [0]


def test_chunks_end_where_snapshots_are_taken() -> None:
    run = stateful()
    run.add(counted(PROMPT[:30]))
    counts = []
    while not run.scheduler.idle:
        counts.append([chunk.tokens for chunk in run.step()])
    assert counts == [[16], [12], [2], [1]]
    assert np.count_nonzero([len(each) for each in counts]) == 4
