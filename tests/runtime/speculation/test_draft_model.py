"""A second engine over the same blocks: what it knows of them, when it reads, and that it reads nothing twice."""

from __future__ import annotations

import pytest

from llmc.program import Limits
from llmc.runtime.scheduling.block_pool import BlockPool
from llmc.runtime.speculation.speculation import Speculation
from tests.runtime.model_free import PROMPT, Counted, Run
from tests.runtime.speculation.guesses import Open
from tests.runtime.speculation.second_cells import SecondCells

LIMITS = Limits(16, 4, 8, max_model_len=64, block_size=4)


def second(
    blocks: int = 40, *, limits: Limits = LIMITS, most: int = 3, own: Limits | None = None
) -> tuple[Run, SecondCells]:
    """A run with a second engine; own: its limits, if they are others."""
    drafter = SecondCells(blocks, own or limits)
    speculation = Speculation(lambda: drafter, most, Open)
    return Run(limits, blocks, speculation=speculation), drafter


def served(run: Run, *requests: Counted) -> None:
    """All at the same time; they end as they have to."""
    for request in requests:
        run.add(request)
    run.finish()
    assert all(request.tokens == request.expected() for request in requests)
    assert run.pool.used == 0


def test_a_request_is_read_once() -> None:
    run, drafter = second()
    served(run, Counted(PROMPT[:10], 30))
    accepted = run.speculation.stats.accepted_tokens if run.speculation else 0
    assert drafter.given > 20 and accepted > 10
    assert drafter.cells.tokens <= 10 + 30 + drafter.given - accepted, "the prompt, the output, and drafts in vain"


def test_a_prefix_that_was_found_has_been_read() -> None:
    run, drafter = second()
    served(run, Counted(PROMPT[:20], 12, salt=b""))
    before = drafter.cells.tokens
    served(run, Counted([*PROMPT[:20], 5], 2, salt=b""))
    assert drafter.cells.tokens - before <= 6


def test_a_prefix_that_only_the_first_engine_knows_is_read() -> None:
    """While nobody drafted, or by a request that got no second token."""
    run, drafter = second()
    served(run, Counted(PROMPT[:20], 1, salt=b""))
    assert drafter.cells.tokens == 0
    following = Counted([*PROMPT[:20], 5], 12, salt=b"")
    served(run, following)
    assert following.standing.cached_tokens == 20 and drafter.cells.tokens > 21
    assert drafter.given > 6


def test_a_prompt_longer_than_its_step_is_read_in_several() -> None:
    run, drafter = second(own=Limits(6, 4, 8, 64, 4))
    served(run, Counted(PROMPT[:30], 20))
    assert drafter.given > 6


def test_more_requests_than_it_has_seats_for_take_turns_in_one_step() -> None:
    run, drafter = second(own=Limits(8, 1, 8, 64, 4))
    served(run, *(Counted(PROMPT[i : i + 5], 16) for i in range(3)))
    assert drafter.given > 20


def test_it_goes_on_after_a_preemption() -> None:
    run, drafter = second(blocks=14)
    served(run, *(Counted(PROMPT[i : i + 9], 30, salt=b"") for i in range(3)))
    assert run.scheduler.preemptions and drafter.given


def test_choices_part_with_what_it_has_read() -> None:
    run, drafter = second()
    served(run, Counted(PROMPT[:18], 16, forks=2))
    assert drafter.given > 20


def test_a_block_that_is_given_anew_holds_nothing() -> None:
    pool = BlockPool(2)
    drafter = SecondCells(2, LIMITS)
    drafter.watch(pool)
    request = Counted(PROMPT[:6], 8)
    request.standing.blocks = pool.allocate(2)
    drafter.propose([request], [1])
    cache = drafter._cache
    assert cache.known(request, request.tokens) == 6
    other = Counted(PROMPT[:6], 8)
    pool.release(request.standing.blocks)
    other.standing.blocks = pool.allocate(2)
    assert cache.known(other, other.tokens) == 0


@pytest.mark.parametrize(("written", "known"), [([3, 10, 17, 24, 31], 5), ([3, 10, 9, 24, 31], 2), ([3, 10, 17], 3)])
def test_what_is_known_ends_where_the_tokens_differ(written: list[int], known: int) -> None:
    pool = BlockPool(3)
    drafter = SecondCells(3, LIMITS)
    drafter.watch(pool)
    request = Counted([3, 10, 17, 24, 31, 38], 8)
    request.standing.blocks = pool.allocate(2)
    cache = drafter._cache
    cache.note(request, 0, written)
    assert cache.known(request, request.tokens) == known


def test_rows_after_a_draft_that_did_not_come_true_are_of_no_use() -> None:
    """Though the same token stands there: it followed others."""
    pool = BlockPool(3)
    drafter = SecondCells(3, LIMITS)
    drafter.watch(pool)
    request = Counted([1, 2, 3, 4, 5, 6], 8)
    request.standing.blocks = pool.allocate(3)
    cache = drafter._cache
    cache.note(request, 0, [1, 2, 9, 4, 5, 6])
    assert cache.known(request, request.tokens) == 2
    cache.note(request, 2, [3])
    assert cache.known(request, request.tokens) == 3
    cache.note(request, 3, [4])
    assert cache.known(request, request.tokens) == 4
