"""What requests hold, find again and compute at once where caches keep less than everything."""

from __future__ import annotations

import pytest

from llmc.program import CachePolicy, Limits, Stride
from llmc.runtime.speculation.speculation import Speculation
from tests.cache_policies.every_other_block import EveryOtherBlock
from tests.cache_policies.sinks_and_recent import SinksAndRecent
from tests.runtime.model_free import PROMPT, Counted, Run, next_token
from tests.runtime.speculation.guesses import Guesses, Open

LIMITS = Limits(16, 2, 16, max_model_len=1024, block_size=4)
CUT = EveryOtherBlock(4, 6, 2)
STRIDE = Stride(step=3, recent=8, sinks=4, rows=4)


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


def test_a_prefix_is_found_up_to_the_first_cut() -> None:
    run = Run(LIMITS, 64, policies=(CUT,), spare=32)
    for prompt in (PROMPT, PROMPT, PROMPT[:18]):
        request = Counted(prompt, 3, salt=b"")
        run.add(request)
        run.finish()
        assert request.tokens == request.expected()
    assert [request.standing.cached_tokens for request in run.requests] == [0, 20, 16]


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
