"""The scheduler with a second tier, without a model: prefixes that come back, requests that are swapped."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from llmc.errors import UnavailableError
from llmc.program import CachePolicy, Limits, Nearest
from llmc.runtime.kv_tier.block_store import BlockKey
from llmc.runtime.kv_tier.host_blocks import HostBlocks
from tests.cache_policies.every_other_block import EveryOtherBlock
from tests.cache_policies.one_way import OneWay
from tests.cache_policies.sinks_and_recent import SinksAndRecent
from tests.runtime.model_free import PROMPT, Counted, Run
from tests.runtime.scheduling.lockstep import Lockstep

LIMITS = Limits(16, 4, 4, 64, 4)
POLICIES = [(), (Nearest(5),), (SinksAndRecent(3, 6), Nearest(9)), (EveryOtherBlock(4, 4, 2),)]


def counted(begin: int, prompt: int, output: int, **options: Any) -> Counted:
    return Counted([(begin + token) % 97 for token in PROMPT[:prompt]], output, **{"salt": b"", **options})


def finish(run: Run, *requests: Counted) -> int:
    """How many tokens were computed until all have their answers."""
    for request in requests:
        run.add(request)
    computed = 0
    while not run.scheduler.idle:
        computed += sum(chunk.tokens for chunk in run.step())
        assert run.steps < 5000, "requests take each other's blocks for ever"
    assert all(request.tokens == request.expected() for request in requests)
    return computed


@pytest.mark.parametrize("policies", POLICIES)
def test_a_prefix_comes_back_after_its_blocks_fell_out(policies: tuple[CachePolicy, ...]) -> None:
    run = Run(LIMITS, 16, policies=policies, spare=8, tier_blocks=200)
    assert finish(run, counted(0, 40, 2)) == 41
    for begin in range(1, 5):
        finish(run, counted(begin, 40, 2))
    assert run.pool.free <= 1, "the pool is full of others'"
    again = counted(0, 40, 2)
    cost = finish(run, again)
    if not any(policy.fills_at for policy in policies):
        assert cost == 5 and again.standing.cached_tokens == 36
    assert run.scheduler.second_tier is not None and run.scheduler.second_tier.stats.hits >= 12


def test_without_a_tier_it_is_computed_again() -> None:
    run = Run(LIMITS, 16)
    for begin in range(5):
        finish(run, counted(begin, 40, 2))
    assert finish(run, counted(0, 40, 2)) == 41


def test_other_salts_find_nothing() -> None:
    run = Run(LIMITS, 16, tier_blocks=200)
    for begin in range(4):
        finish(run, counted(begin, 40, 2))
    assert finish(run, counted(0, 40, 2, salt=b"another")) == 41
    assert finish(run, counted(0, 40, 2, salt=None)) == 41


@pytest.mark.parametrize("policies", POLICIES)
@pytest.mark.parametrize("salt", [None, b""])
def test_a_preempted_request_goes_on_where_it_was(policies: tuple[CachePolicy, ...], salt: bytes | None) -> None:
    run = Run(LIMITS, 16, policies=policies, spare=24, tier_blocks=200)
    requests = [counted(begin, 10, 40, salt=salt) for begin in range(3)]
    assert finish(run, *requests) == 3 * 49, "each token but the last is computed once"
    assert run.scheduler.preemptions
    stats = run.scheduler.second_tier.stats  # type: ignore[union-attr]
    assert stats.swapped == 0 and stats.hits > 0


def test_what_was_swapped_out_goes_when_its_client_does() -> None:
    run = Run(LIMITS, 16, tier_blocks=200)
    requests = [counted(begin, 10, 40, salt=None) for begin in range(3)]
    for request in requests:
        run.add(request)
    while not run.scheduler.preemptions:
        run.step()
    tier = run.scheduler.second_tier
    assert tier is not None and tier.stats.swapped and tier.stats.blocks
    for request in requests:
        request.end()
        run.scheduler.remove(request)
    assert (tier.stats.swapped, tier.stats.blocks) == (0, 0)


def test_shared_beginnings_are_shared_again() -> None:
    """Requests of one prompt hold its blocks together, also after they were swapped out."""
    run = Run(LIMITS, 18, tier_blocks=200)
    finish(run, counted(0, 33, 1))
    finish(run, *(counted(0, 33, 30) for _ in range(4)))
    assert run.scheduler.preemptions


def test_parked_and_forked_sequences_are_swapped() -> None:
    run = Run(LIMITS, 14, tier_blocks=200)
    group = Lockstep(PROMPT[:18], 16, 3, run.requests, salt=b"")
    run.scheduler.add(group.first)
    finish(run, *(counted(begin, 9, 20, forks=2) for begin in range(2)))
    assert run.scheduler.preemptions and group.finished and group.error is None


def test_a_tier_that_lost_all_costs_time_alone() -> None:
    run = Run(LIMITS, 16, tier_blocks=200)
    requests = [counted(begin, 10, 40, salt=None) for begin in range(3)]
    for request in requests:
        run.add(request)
    while not run.scheduler.idle:
        run.step()
        for key in list(run.tier._entries):  # type: ignore[union-attr]
            run.tier.drop([key])  # type: ignore[union-attr]
    assert run.scheduler.preemptions and all(request.tokens == request.expected() for request in requests)


def test_damaged_blocks_are_computed() -> None:
    run = Run(LIMITS, 16, tier_blocks=200)
    for begin in range(5):
        finish(run, counted(begin, 40, 2))
    store = run.tier._store  # type: ignore[union-attr]
    assert isinstance(store, HostBlocks)
    first = counted(0, 40, 2)
    damaged = BlockKey(0, run.scheduler.prefix_cache.digest(first, 4))
    store._blocks[damaged][0][0] ^= 1
    assert finish(run, first) == 41 - 16, "all before the damaged block was found"


def test_what_cannot_be_computed_again_comes_back() -> None:
    run = Run(LIMITS, 16, policies=(OneWay(4, 4, 2),), spare=24, tier_blocks=200)
    requests = [counted(begin, 20, 30) for begin in range(3)]
    assert finish(run, *requests) == 3 * 49
    assert run.scheduler.preemptions


@pytest.mark.parametrize("tier_blocks", [None, 3])
def test_without_room_what_cannot_be_computed_again_fails_alone(tier_blocks: int | None) -> None:
    run = Run(LIMITS, 16, policies=(OneWay(4, 4, 2),), spare=24, tier_blocks=tier_blocks)
    requests = [counted(begin, 20, 30) for begin in range(3)]
    for request in requests:
        run.add(request)
    run.finish()
    failed = [request for request in requests if request.error is not None]
    assert failed and len(failed) < 3 and run.pool.used == 0
    assert all(isinstance(request.error, UnavailableError) for request in failed)
    assert "cannot be computed again" in str(failed[0].error)
    assert all(request.tokens == request.expected() for request in requests if request.error is None)


def test_the_same_blocks_are_kept_once() -> None:
    run = Run(LIMITS, 16, tier_blocks=200)
    for _ in range(3):
        for begin in range(5):
            finish(run, counted(begin, 40, 2))
    stats = run.scheduler.second_tier.stats  # type: ignore[union-attr]
    assert stats.stored_blocks <= 5 * 10 and stats.loaded_blocks > 50


def test_a_step_under_way_is_not_disturbed() -> None:
    """Between two plans nothing is read or written that a plan has given out."""
    run = Run(LIMITS, 16, tier_blocks=200)
    caches = run.scheduler.second_tier._offload.caches  # type: ignore[union-attr]
    planned: list[bool] = []
    schedule = run.scheduler.schedule

    def watched() -> Any:
        planned.append(True)
        found = schedule()
        planned.pop()
        return found

    def only_planning(call: Any) -> Any:
        def checked(*arguments: Any) -> Any:
            assert planned, "blocks are moved while a step may run"
            return call(*arguments)

        return checked

    run.scheduler.schedule = watched  # type: ignore[method-assign]
    caches.read_blocks = only_planning(caches.read_blocks)  # type: ignore[method-assign]
    caches.write_blocks = only_planning(caches.write_blocks)  # type: ignore[method-assign]
    requests = [counted(begin, 10, 40, forks=1) for begin in range(3)]
    finish(run, *requests)
    finish(run, *(counted(begin, 10, 40, forks=1) for begin in range(3)))
    assert run.scheduler.preemptions and np.unique(run.cells).size > 1
