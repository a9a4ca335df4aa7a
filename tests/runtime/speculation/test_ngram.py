"""Prompt lookup against looking for n-grams by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from llmc.runtime.speculation.ngram import NgramDrafter, NgramIndex
from tests.runtime.model_free import Counted
from tests.runtime.speculation.guesses import proposed

TEXTS = st.lists(st.integers(0, 2), max_size=60)


def looked_up(tokens: Sequence[int], shortest: int, longest: int, most: int) -> list[int]:
    """What followed the last place of the longest n-gram that ends the tokens and was there before."""
    for length in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        for place in range(len(tokens) - 1, length - 1, -1):
            if tokens[place - length : place] == tokens[-length:]:
                text = list(tokens)
                while len(text) < len(tokens) + most:
                    text.append(text[len(text) - (len(tokens) - place)])
                return text[len(tokens) :]
    return []


@given(st.lists(TEXTS, max_size=12), st.integers(1, 4), st.integers(0, 4), st.integers(1, 9))
def test_drafts_are_what_a_search_finds_however_the_text_has_grown(
    parts: list[list[int]], shortest: int, more: int, most: int
) -> None:
    tokens: list[int] = []
    index = NgramIndex(tokens, range(shortest + more, shortest - 1, -1))
    for part in parts:
        tokens += part
        assert index.continuation(most) == looked_up(tokens, shortest, shortest + more, most)
    assert sum(map(len, index._places)) <= (1 + more) * len(tokens)


def test_the_most_recent_place_and_the_longest_match_count() -> None:
    index = NgramIndex([1, 2, 7, 1, 2, 8, 5, 2, 9, 1, 2], range(2, 0, -1))
    assert index.continuation(3) == [8, 5, 2]


def test_a_text_that_repeats_a_token_is_drafted_to_the_end() -> None:
    assert NgramIndex([4, 4, 4], range(2, 0, -1)).continuation(5) == [4] * 5
    assert NgramIndex([1, 2, 1, 2, 1], range(2, 0, -1)).continuation(5) == [2, 1, 2, 1, 2]


def test_each_token_is_read_once() -> None:
    tokens = CountingReads([1, 2, 3] * 200)
    index = NgramIndex(tokens, range(3, 2, -1))
    index.continuation(4)
    before = tokens.reads
    tokens.append(1)
    index.continuation(4)
    assert before >= len(tokens) - 1 - 3
    assert tokens.reads - before <= 4


def test_requests_are_looked_up_in_themselves_alone() -> None:
    drafter = NgramDrafter(2, 3)
    requests = [Counted([1, 2, 3, 1, 2], 8, salt=b""), Counted([5, 1, 2], 8, salt=b""), Counted([6, 7, 6, 7], 8)]
    assert [list(draft.tokens) for draft in proposed(drafter.propose(requests, [2, 2, 0]))] == [[3, 1], [], []]


def test_a_request_that_has_ended_is_forgotten() -> None:
    drafter = NgramDrafter(1, 1)
    request = Counted([1, 2, 1], 8)
    assert list(proposed(drafter.propose([request], [1]))[0].tokens) == [2]
    drafter.forget(request)
    drafter.forget(request)
    request.tokens[:] = [3, 1]
    assert list(proposed(drafter.propose([request], [1]))[0].tokens) == []


class CountingReads(list[int]):
    """Counts how often it is looked into."""

    reads = 0

    def __getitem__(self, place: Any) -> Any:
        self.reads += 1
        return super().__getitem__(place)
