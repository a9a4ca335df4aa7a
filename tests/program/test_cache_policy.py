"""Cache policies as text, and what follows from what a token sees."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import pytest

from llmc.errors import EngineFormatError
from llmc.program import EVERYTHING, CachePolicy, Cut, Limits, Nearest, Progress, Streaming, Stride, Visible
from llmc.program.program_json import program_from_json, program_to_json
from tests.cache_policies.every_other_block import EveryOtherBlock
from tests.cache_policies.sinks_and_recent import SinksAndRecent
from tests.program.test_program_json import AT, PROGRAM

POLICIES = (EVERYTHING, Nearest(512), Nearest(7, 12), SinksAndRecent(4, 60), EveryOtherBlock(16, 8, 2))


def test_programs_hold_them_as_text() -> None:
    program = replace(PROGRAM, policies=POLICIES)
    text = program_to_json(program)
    for policy in (
        "everything",
        "nearest:window=512",
        "nearest:window=7,chunk=12",
        "sinks_and_recent:sinks=4,recent=60",
    ):
        assert f'\n"{policy}"' in text
    assert program_from_json(text, AT) == program
    assert "policies" not in program_to_json(PROGRAM)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "lost:sinks=4",
            "'lost:sinks=4' is not a cache policy that is imported. Known policies: compactor, every_other_block, ",
        ),
        ("nearest:width=3", "'width=3' is not OPTION=NUMBER with an option of nearest (window, chunk)"),
        ("nearest:window=-3", "'window=-3' is not OPTION=NUMBER"),
        ("nearest:window=0", "a window of 0 tokens leaves nothing to see"),
        ("sinks_and_recent:sinks=4", "it lacks recent"),
        ("everything:all=1", "'all=1' is not OPTION=NUMBER with an option of everything ()"),
    ],
)
def test_what_names_none_is_refused(text: str, problem: str) -> None:
    program = program_to_json(replace(PROGRAM, policies=(Nearest(512),))).replace("nearest:window=512", text)
    with pytest.raises(EngineFormatError) as caught:
        program_from_json(program, AT)
    assert problem in caught.value.problem
    assert str(caught.value.at).endswith("program.policies[0]")


@pytest.mark.parametrize("wrong", ["3", "null", '{"window": 512}'])
def test_a_policy_is_a_text(wrong: str) -> None:
    program = program_to_json(replace(PROGRAM, policies=(Nearest(512),)))
    with pytest.raises(EngineFormatError, match="expected a text"):
        program_from_json(program.replace('"nearest:window=512"', wrong), AT)


def test_each_token_sees_pinned_keys_and_those_near_it() -> None:
    *_, before, last = SinksAndRecent(2, 3).seen(7)
    assert before == [0, 1, 3, 4, 5] and last == [0, 1, 4, 5, 6]
    assert [*SinksAndRecent(2, 1).seen(4)] == [[0], [0, 1], [0, 1, 2], [0, 1, 3]]
    assert [*Nearest(2, 3).seen(5)] == [[0], [0, 1], [1, 2], [3], [3, 4]]
    assert Visible(5, 3, 2).most == 5 and Visible(pinned=2).most is None


def test_a_full_table_loses_rows_and_later_tokens_see_the_rest() -> None:
    *_, before, after, last = EveryOtherBlock(2, 4, 1).seen(10)
    assert before == [0, 1, 2, 3, 4, 5, 6, 7] and after == [0, 1, 4, 5, 6, 7, 8] and last == [*after, 9]


def test_what_a_table_holds_and_when_it_is_cut() -> None:
    policy = EveryOtherBlock(2, 4, 1)
    assert [*policy.cuts(13)] == [8, 10, 12] and not [*EVERYTHING.cuts(13)]
    assert policy.held(7) == [*range(7)] and policy.held(8) == [0, 1, 4, 5, 6, 7]
    assert all(len(policy.held(tokens)) < len(policy.held(tokens - 1)) for tokens in policy.cuts(13))


@dataclass(frozen=True)
class Leaving(CachePolicy):
    """These rows leave a table of 16."""

    NAME: ClassVar[str] = "leaving"
    rows: tuple[range, ...]
    shows: Visible = field(default_factory=lambda: Visible(window=16))

    @property
    def visible(self) -> Visible:
        return self.shows

    @property
    def fills_at(self) -> int:
        return 16

    def leaving(self) -> tuple[range, ...]:
        return self.rows


@pytest.mark.parametrize(
    ("policy", "problem"),
    [
        (Leaving((range(4, 8), range(12, 16))), None),
        (EVERYTHING, None),
        (Leaving((range(4, 6),)), "cuts tables at row 6, which is not a multiple of block_size=4"),
        (Leaving(()), "cuts tables of 16 rows, but [] are not some of them in order"),
        (Leaving((range(12, 20),)), "cuts tables of 16 rows, but [range(12, 20)] are not some"),
        (Leaving((range(8, 12), range(0, 4))), "[range(8, 12), range(0, 4)] are not some of them in order"),
        (Leaving((range(4, 8),), Visible(window=8)), "hides rows of them besides: Visible(window=8"),
    ],
    ids=str,
)
def test_how_tables_cannot_be_cut(policy: CachePolicy, problem: str | None) -> None:
    found = policy.cut_problem(4)
    assert (found is None) == (problem is None) and (problem or "") in (found or ("",))[0]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_one_sequence_always_fits(policy: CachePolicy) -> None:
    limits = Limits(2048, 2, 64, max_model_len=32768, block_size=16)
    whole = limits.blocks_for(limits.max_model_len)
    assert policy.sequence_blocks(limits, limits.max_batch_tokens) <= policy.pool_blocks(limits, whole) <= whole
    assert policy.pool_blocks(limits, 0) == 0


def test_a_table_that_is_cut_needs_no_more_than_it_holds() -> None:
    limits = Limits(2048, 2, 64, max_model_len=32768, block_size=16)
    assert EveryOtherBlock(16, 8, 2).sequence_blocks(limits, 2048) == 8
    assert SinksAndRecent(17, 33).sequence_blocks(limits, 1) == 2 + 3


@pytest.mark.parametrize(
    "policy",
    [EveryOtherBlock(16, 8, 2), Stride(step=3, recent=16, sinks=8, rows=8), Streaming(budget=32, sinks=3, every=16)],
    ids=lambda policy: policy.NAME,
)
def test_newest_rows_stay_in_order(policy: CachePolicy) -> None:
    """No smaller number would be the largest that holds at every cut."""
    assert policy.newest is not None
    least = 400
    for end in policy.cuts(400):
        held = policy.held(end)
        least = min(least, next(back for back in range(1, end + 1) if held[-back:] != list(range(end - back, end))) - 1)
    assert policy.newest == least


def test_newest_rows_of_a_policy_whose_cuts_say_more_are_those_that_it_names() -> None:
    """A cut that is not that of `fills_at`, or that moves rows, is not taken for one that leaves newest rows alone."""

    class Own(CachePolicy):
        NAME: ClassVar[str] = ""
        drops_rows = True

    class Moving(EveryOtherBlock):
        NAME: ClassVar[str] = ""

        def cut(self, done: Progress) -> Cut:
            return Cut((range(8, 16),), sources=(60,), destinations=(59,))

    assert Own().newest == 0
    assert Moving(8, 8, 2).newest == 64 - 60


def test_policies_that_cut_nothing_keep_all_newest_rows() -> None:
    assert EVERYTHING.newest is Nearest(8).newest is None
