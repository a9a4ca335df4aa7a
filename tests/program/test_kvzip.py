"""When tables are cut by kvzip, and what stays."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmc.program import CachePolicy, Cut, KVzip

POLICY = KVzip(budget=16, every=8, block=8, chunk=40)


def cuts(policy: KVzip, prompt: int) -> list[tuple[int, Cut]]:
    return list(policy.all_cuts(prompt))


@pytest.mark.parametrize(("prompt", "end"), [(33, 24), (40, 24), (41, 32), (104, 88), (105, 96)])
def test_a_block_of_the_prompt_follows_the_only_cut(prompt: int, end: int) -> None:
    """And a token that is always computed, so that others with the prompt find the block."""
    assert cuts(POLICY, prompt) == [(end, Cut((range(16, end),), chosen=16, reads=40))]


@pytest.mark.parametrize("prompt", [0, 1, 9, 17, 32])
def test_nothing_is_read_for_a_budget_that_is_not_reached(prompt: int) -> None:
    assert cuts(POLICY, prompt) == []


def test_a_share_is_that_of_the_rows_that_are_read_again() -> None:
    policy = KVzip(share=50, block=8)
    ((end, cut),) = cuts(policy, 106)
    assert (end, cut.chosen, cut.reads) == (96, 48, 2048)
    assert cuts(KVzip(share=100, block=8), 106) == []


@pytest.mark.parametrize(("prefix", "end"), [(60, 48), (64, 56), (65, 56), (500, 96)])
def test_prompts_of_any_length_have_one_cut_within_their_prefix(prefix: int, end: int) -> None:
    policy = replace(POLICY, prefix=prefix)
    assert [at for at, _ in cuts(policy, 106)] == [end]
    if prefix < 100:
        assert cuts(policy, 106) == cuts(policy, 300)


@pytest.mark.parametrize(
    ("policy", "scored", "kept"),
    [
        (replace(POLICY, prefix=15), 0, 16),
        (replace(POLICY, prefix=24), 16, 16),
        (KVzip(share=30, block=8, prefix=17), 8, 8),
        (KVzip(share=99, block=8, prefix=100), 88, 88),
        (KVzip(share=50, sinks=2**31 - 128, block=8, prefix=100), 88, 2**31 - 120),
    ],
)
def test_a_prefix_without_rows_to_drop_is_refused(policy: KVzip, scored: int, kept: int) -> None:
    found = policy.cut_problem(8)
    assert found is not None and f"{scored} of its rows are scored, and {kept} are kept" in found[0]
    least = policy.least_prefix()
    assert found[1] == f"give prefix={least} or more, or leave it out"
    assert replace(policy, prefix=least).cut_problem(8) is None
    assert replace(policy, prefix=least - 1).cut_problem(8) is not None


def test_eager_runs_read_nothing_again() -> None:
    assert list(POLICY.cuts(200)) == []
    assert list(POLICY.seen(60))[-1] == list(range(60))
    assert POLICY.held(24, 33) == list(range(16)) and POLICY.held(26, 33) == [*range(16), 24, 25]


def test_text_says_what_differs_from_the_defaults() -> None:
    text = "kvzip:budget=16,every=8,sinks=4,block=8,chunk=40"
    assert str(POLICY) == text and CachePolicy.from_text(text) == POLICY
    assert CachePolicy.from_text("kvzip:share=30,prefix=4096") == KVzip(share=30, prefix=4096)


def test_requests_choose_what_is_not_in_the_graph() -> None:
    assert POLICY.runs(KVzip(share=30, every=8, chunk=512, prefix=100))
    assert not POLICY.runs(KVzip(budget=16, every=16)) and not POLICY.runs(KVzip(budget=16, every=8, sinks=0))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"every": 129}, "every=129 is not a number of queries from 1 to 128"),
        ({"chunk": 0}, "chunk=0 must be 1 or more"),
        ({"prefix": 0}, "prefix=0 must be 1 or more"),
        ({"sinks": 16}, "budget=16 leaves no room in addition to the 16 protected rows"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, int], problem: str) -> None:
    with pytest.raises(ValueError) as caught:
        replace(POLICY, **options)
    assert problem in str(caught.value)
