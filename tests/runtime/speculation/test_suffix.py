"""Suffix decoding against counting substrings by hand; and who may learn from whom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.runtime.speculation.earlier_answers import EarlierAnswers
from llmc.runtime.speculation.suffix import SuffixDrafter
from llmc.runtime.speculation.suffix_automaton import NO_CONTINUATION, Continuation, SuffixAutomaton
from tests.runtime.model_free import Counted
from tests.runtime.speculation.guesses import proposed

TEXT = st.lists(st.integers(0, 2), max_size=30)
ALICE, BOB = b"alice", b"bob"


def automaton(depth: int, texts: Sequence[Sequence[int]]) -> SuffixAutomaton:
    made = SuffixAutomaton(depth)
    for text in texts:
        made.begin_text()
        made.extend(text)
    return made


def following(texts: Sequence[Sequence[int]], substring: Sequence[int]) -> Counter[int]:
    """How often each token follows the substring, those that did so first in front."""
    size = len(substring)
    return Counter(t[i + size] for t in texts for i in range(len(t) - size) if list(t[i : i + size]) == substring)


def occurs(texts: Sequence[Sequence[int]], substring: Sequence[int]) -> bool:
    size = len(substring)
    return any(list(t[i : i + size]) == substring for t in texts for i in range(len(t) - size + 1))


def best_draft(
    texts: Sequence[Sequence[int]], tokens: Sequence[int], depth: int, most: int, factor: float, least: float
) -> Continuation:
    """Of every suffix that occurs the likeliest tokens, one by one; of these drafts the best."""
    best = NO_CONTINUATION
    for size in range(min(depth, len(tokens)), 0, -1):
        text = list(tokens[-size:])
        if not occurs(texts, text):
            continue
        probability, score = 1.0, 0.0
        while len(text) < size + min(most, int(size * factor), depth - size):
            counts = following(texts, text)
            if not counts:
                break
            ((token, count),) = counts.most_common(1)
            probability = probability * count / counts.total()
            if probability < least:
                break
            text.append(token)
            score += probability
        if score > best.score:
            best = Continuation(text[size:], score)
    return best


@given(
    st.lists(TEXT, min_size=1, max_size=4),
    TEXT,
    st.integers(1, 8),
    st.integers(1, 9),
    st.sampled_from((0.0, 0.5, 1.0, 2.5)),
    st.sampled_from((0.0, 0.1, 0.4, 1.0)),
)
def test_drafts_are_the_most_frequent_continuations(
    texts: list[list[int]], other: list[int], depth: int, most: int, factor: float, least: float
) -> None:
    made = automaton(depth, texts)
    for tokens, match in ((texts[-1], made.end), (texts[-1], made.match(texts[-1])), (other, made.match(other))):
        draft, expected = made.draft(match, most, factor, least), best_draft(texts, tokens, depth, most, factor, least)
        assert list(draft.tokens) == list(expected.tokens)
        assert draft.score == pytest.approx(expected.score)
    assert len(made._next) <= 1 + 2 * sum(map(len, texts))


@given(st.lists(TEXT, max_size=6), st.integers(1, 8))
def test_a_text_that_grows_is_known_like_one_that_is_read_at_once(parts: list[list[int]], depth: int) -> None:
    grown, text = SuffixAutomaton(depth), []
    for part in parts:
        grown.extend(part)
        text += part
        at_once = automaton(depth, [text])
        assert grown.draft(grown.end, 8, 1.0, 0.0) == at_once.draft(at_once.end, 8, 1.0, 0.0)


def drafter(*, answers: int = 10, depth: int = 24) -> SuffixDrafter:
    return SuffixDrafter(depth, 1.0, 0.1, EarlierAnswers(depth, answers))


def answer(made: SuffixDrafter, salt: bytes | None, output: Sequence[int]) -> None:
    """Serve a request that writes this after the prompt 90, 91."""
    request = Counted([90, 91], len(output), salt=salt)
    made.propose([request], [1])
    request.tokens += output
    made.forget(request)


def drafts(made: SuffixDrafter, salt: bytes | None, prompt: Sequence[int], most: int = 4) -> list[int]:
    return list(proposed(made.propose([Counted(prompt, 8, salt=salt)], [most]))[0].tokens)


def test_a_request_is_drafted_from_itself() -> None:
    assert drafts(drafter(), None, [1, 2, 3, 4, 9, 1, 2]) == [3, 4]
    assert drafts(drafter(), None, [1, 2, 3, 4]) == []
    assert drafts(drafter(), None, [1, 2, 3, 4, 9, 1, 2], most=0) == []


def test_an_earlier_answer_is_drafted_but_not_its_prompt() -> None:
    made = drafter()
    answer(made, ALICE, [1, 2, 3, 4, 5])
    assert drafts(made, ALICE, [7, 1, 2]) == [3, 4]
    assert drafts(made, ALICE, [7, 90]) == []


def test_no_salt_sees_what_another_has_written() -> None:
    made = drafter()
    answer(made, ALICE, [1, 2, 3, 4, 5])
    answer(made, BOB, [6, 7, 8])
    assert drafts(made, BOB, [1, 2]) == drafts(made, b"", [1, 2]) == drafts(made, None, [1, 2]) == []
    assert drafts(made, ALICE, [6, 7]) == []
    assert drafts(made, BOB, [6, 7]) == [8]


def test_a_request_without_salt_teaches_nobody() -> None:
    made = drafter()
    answer(made, None, [1, 2, 3, 4, 5])
    for salt in (None, b"", ALICE):
        assert drafts(made, salt, [1, 2]) == []


def test_a_request_that_failed_teaches_nobody() -> None:
    made = drafter()
    request = Counted([90], 8, salt=ALICE)
    made.propose([request], [1])
    request.tokens += [1, 2, 3]
    request.salt = None
    made.forget(request)
    assert drafts(made, ALICE, [1, 2]) == []


def test_a_request_that_is_dropped_twice_teaches_once() -> None:
    earlier = EarlierAnswers(24, 10)
    made, request = SuffixDrafter(24, 1.0, 0.1, earlier), Counted([90], 8, salt=ALICE)
    made.propose([request], [1])
    request.tokens += [1, 2, 3]
    made.forget(request)
    made.forget(request)
    assert (earlier.answers, earlier.tokens) == (1, 3)


def test_the_draft_that_promises_more_is_taken() -> None:
    made = drafter()
    answer(made, ALICE, [1, 2, 3, 4, 5, 6])
    assert drafts(made, ALICE, [2, 3, 8, 1, 2, 3]) == [4, 5, 6]
    assert drafts(made, ALICE, [1, 2, 3, 7, 7, 1, 2, 3]) == [7, 7, 1]


def test_a_long_prompt_is_read_over_several_steps() -> None:
    made, request = drafter(), Counted([*range(3000), 5, 6], 8)
    assert [list(proposed(made.propose([request], [2]))[0].tokens) for _ in range(3)] == [[], [7, 8], [7, 8]]


@given(st.lists(st.tuples(st.sampled_from((b"", ALICE, BOB)), st.integers(1, 9)), max_size=40), st.integers(0, 6))
def test_no_more_answers_and_tokens_are_kept_than_there_is_room_for(
    given: list[tuple[bytes, int]], most_answers: int
) -> None:
    earlier = EarlierAnswers(8, most_answers, most_tokens=20)
    for salt, size in given:
        earlier.add(salt, [7] * size)
        assert earlier.answers <= most_answers
        assert earlier.tokens <= 20
        kept = [each for one in (b"", ALICE, BOB) for each in earlier.of(one)]
        assert sum(len(each._next) - 1 for each in kept) <= 2 * earlier.tokens
        assert bool(list(earlier.of(salt))) == bool(most_answers)


def test_the_tenant_that_was_not_seen_for_longest_loses_answers_first() -> None:
    earlier = EarlierAnswers(8, 4)
    for salt in (ALICE, BOB, ALICE, BOB):
        earlier.add(salt, [1, 2])
    assert earlier.of(ALICE)
    earlier.add(b"", [1, 2])
    assert (bool(earlier.of(ALICE)), bool(earlier.of(BOB)), bool(earlier.of(b""))) == (True, False, True)
    assert earlier.answers == 3


def test_an_answer_that_is_longer_than_all_there_is_room_for_is_not_kept() -> None:
    earlier = EarlierAnswers(8, 4, most_tokens=3)
    earlier.add(ALICE, [1, 2, 3])
    earlier.add(ALICE, [1, 2, 3, 4])
    assert (earlier.answers, earlier.tokens) == (1, 3)
