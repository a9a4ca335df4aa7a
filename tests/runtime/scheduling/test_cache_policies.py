"""What requests hold, find again and compute at once where caches keep less than everything."""

from __future__ import annotations

import pytest

from llmc.program import H2O, CachePolicy, Limits, Nearest, Streaming, Stride, TriAttention
from llmc.runtime.requests.request_state import GroupTable
from llmc.runtime.scheduling.block_pool import BlockPool
from llmc.runtime.scheduling.cut_tables import CutTables
from llmc.runtime.speculation.speculation import Speculation
from tests.cache_policies.every_other_block import EveryOtherBlock
from tests.cache_policies.one_way import OneWay
from tests.cache_policies.sinks_and_recent import SinksAndRecent
from tests.runtime.model_free import PROMPT, Counted, Run, next_token
from tests.runtime.speculation.guesses import Guesses, Open

LIMITS = Limits(16, 2, 16, max_model_len=1024, block_size=4)
CUT = EveryOtherBlock(4, 6, 2)
STRIDE = Stride(step=3, recent=8, sinks=4, rows=4)
STREAMING = Streaming(budget=16, sinks=3, every=8)
TRIATTENTION = TriAttention(budget=12, every=4, block=4, pinned=0)


@pytest.mark.parametrize(("policy", "most"), [(SinksAndRecent(5, 9), 2 + 3), (CUT, 6)], ids=str)
def test_a_long_sequence_holds_no_more_than_a_short_one(policy: CachePolicy, most: int) -> None:
    run = Run(LIMITS, 256, policies=(policy,))
    request, held = Counted(PROMPT, 300), list[int]()
    run.add(request)
    while not run.scheduler.idle:
        run.step()
        held.append(run.groups[0].pool.used)
    assert max(held) == most and not held[-1]
    assert request.tokens == request.expected()


def test_a_chunk_ends_where_a_table_is_cut() -> None:
    run = Run(LIMITS, 64, policies=(CUT,))
    run.add(Counted(PROMPT, 3))
    sizes = []
    while not run.scheduler.idle:
        sizes += [chunk.tokens for chunk in run.step() if chunk.tokens > 1]
    # At 24 rows two blocks leave: at 24, 32, 40, … tokens.
    assert sizes == [16, 8, 8, 8, 8, 8, 8]


def test_drafts_end_where_a_table_is_cut() -> None:
    speculation = Speculation(lambda: Guesses(next_token, 97, right=1.0, least=9), 9, Open)
    run = Run(LIMITS, 64, policies=(CUT,), speculation=speculation, spare=8)
    request = Counted(PROMPT[:20], 60)
    run.add(request)
    ends = set()
    while not run.scheduler.idle:
        ends |= {chunk.start + chunk.tokens for chunk in run.step() if chunk.draft}
    assert request.tokens == request.expected() and {24, 32, 40, 48} <= ends


@pytest.mark.parametrize(
    ("policy", "same", "longer"),
    [(CUT, 60, 60), (STRIDE, 56, 64), (STREAMING, 60, 60), (TRIATTENTION, 60, 64)],
    ids=lambda each: str(each)[:6],
)
def test_a_prefix_is_found_behind_its_cuts(policy: CachePolicy, same: int, longer: int) -> None:
    """Of the same prompt; of one that goes on; and of one in front of the first cut. None begins where a cut is due."""
    run = Run(LIMITS, 256, policies=(policy,), spare=64)
    first = Counted(PROMPT, 3, salt=b"")
    requests = [
        first,
        *(Counted(prompt, 30, salt=b"") for prompt in (PROMPT, [*first.expected(), 5, 6, 7], PROMPT[:18])),
    ]
    for request in requests:
        run.add(request)
        run.finish()
        assert request.tokens == request.expected()
    assert [request.standing.cached_tokens for request in run.requests] == [0, same, longer, 16]
    assert run.groups[0].dropped_rows


def test_pinned_rows_are_found_by_requests_with_that_prompt() -> None:
    """Requests that start again, as preempted ones do. Tables of both prompts are cut at 36 and at 48 tokens, but the
    other prompt pins one row more."""
    run = Run(LIMITS, 256, policies=(TriAttention(budget=4, every=12, block=4),), spare=64)
    first = Counted(PROMPT[:17], 40, salt=b"")
    run.add(first)
    run.finish()
    for length in (17, 18):
        again = Counted(first.tokens[:length], 57 - length, salt=b"")
        again.tokens[:] = first.tokens[:55]
        run.add(again)
        run.finish()
    assert [request.standing.cached_tokens for request in run.requests] == [0, 52, 32]
    assert all(request.tokens == first.tokens for request in run.requests)


def test_rows_that_cannot_be_computed_again_are_not_offered() -> None:
    """No digest covers what only the running request has seen."""
    run = Run(LIMITS, 256, policies=(OneWay(4, 6, 2),), spare=64)
    for _ in range(2):
        run.add(Counted(PROMPT, 3, salt=b""))
        run.finish()
    assert [request.standing.cached_tokens for request in run.requests] == [0, 20]


def test_a_cut_table_is_gone_with_any_of_its_blocks() -> None:
    """Rows that the first cut leaves in place are in the blocks of the plain prefix, which has its own end."""
    pool = BlockPool(8)
    tables, blocks = CutTables(pool), pool.allocate(3)
    pool.keep(blocks[:1], "plain")
    tables.add(GroupTable(blocks, 0, 16, 32), {70: 2, 71: 3})
    found = tables.at(70)
    assert found is not None and (found.blocks, found.dropped, found.cut_at) == (blocks[:2], 16, 32)
    pool.release(blocks)
    assert pool.cached == 3
    tables.release(blocks[0])
    assert 70 in tables and pool.cached == 3
    tables.move(71, 80)
    tables.drop((70,))
    assert 71 not in tables and tables.at(80) is not None
    tables.lose(blocks[2:])
    assert 80 not in tables and pool.free == 8


def test_a_prefix_with_its_sinks_is_found_whole() -> None:
    run = Run(LIMITS, 64, policies=(SinksAndRecent(5, 9),))
    for prompt in (PROMPT, PROMPT, [*PROMPT, 1, 2, 3]):
        run.add(Counted(prompt, 3, salt=b""))
        run.finish()
    assert [request.standing.cached_tokens for request in run.requests] == [0, 60, 64]


def test_old_positions_are_kept_by_stride() -> None:
    """Neighbours that share a prefix, forks and a small pool: each token sees what the policy says."""
    run = Run(LIMITS, 256, policies=(STRIDE,), spare=-68)
    requests = [Counted(prompt, 80, salt=b"", forks=1) for prompt in (PROMPT, PROMPT, PROMPT[:30], [*PROMPT[:50], 3])]
    for request in requests:
        run.add(request)
    run.finish()
    assert all(each.tokens == each.expected() for request in requests for each in (request, *request.children))
    assert run.scheduler.prefix_cache.hits and run.scheduler.preemptions
    assert run.groups[0].dropped_rows and run.groups[0].kept_rows


def test_who_starts_leaves_room_for_prompts_whose_chunks_are_cut() -> None:
    """Every chunk of 4 tokens ends at an update of the sums, with tokens left in the step."""
    limits = Limits(16, 4, 4, max_model_len=64, block_size=4)
    policies = H2O(32, every=4, recent=4, block=4), Nearest(5)
    run = Run(limits, 20, policies=policies, spare=64)
    requests = [Counted([begin, *PROMPT[:39]], 1) for begin in range(4)]
    for request in requests:
        run.add(request)
    run.finish()
    assert not run.scheduler.preemptions and all(request.tokens == request.expected() for request in requests)
