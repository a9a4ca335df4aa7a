"""Lookahead decoding: the window's form, what comes of its outcomes, and that text without any draft is guessed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmc import SamplingParams, load
from llmc.errors import OptionError
from llmc.runtime.speculation.config import LookaheadConfig, parse_speculative_config
from llmc.runtime.speculation.lookahead import LookaheadDrafter, NgramPool
from tests.runtime.model_free import Counted
from tests.runtime.speculation.guesses import proposed


def test_a_window_is_a_tree_with_its_first_level_as_a_chain() -> None:
    request = Counted([1, 2, 3, 4, 5, 6], 8)
    (draft,) = proposed(LookaheadDrafter(3, 3, 2).propose([request], [20]))
    # Nothing was ever seen after 6: no guesses. The window starts with the prompt, from its end backwards.
    # 6 ── 6 ── 5 ── 4 and below each the next level.
    assert draft.path([6, 5, 4, 3]) and draft.path([6, 5, 4]) and draft.path([6, 5])
    assert len(draft.path([6, 5, 4, 3])) == 4 and sorted(draft.depths()) == [1, 2, 3, 4]
    assert draft.depth == 4


def test_ngrams_of_the_text_are_guessed() -> None:
    request = Counted([7, 1, 2, 3, 7], 8)
    (draft,) = proposed(LookaheadDrafter(2, 3, 4).propose([request], [20]))
    assert len(draft.path([1, 2])) == 2


def test_a_step_with_room_for_all_verifies_all_guesses() -> None:
    request = Counted([7, 1, 2, 7, 3, 4, 7, 5, 6, 7], 8)
    (draft,) = proposed(LookaheadDrafter(1, 3, 3).propose([request], [8]))
    assert [len(draft.path(list(guess))) for guess in ((1, 2), (3, 4), (5, 6))] == [2, 2, 2]
    (draft,) = proposed(LookaheadDrafter(1, 3, 3).propose([request], [7]))
    assert [len(draft.path(list(guess))) for guess in ((1, 2), (3, 4), (5, 6))] == [0, 0, 2], "the other half is window"


def test_there_are_no_more_drafts_than_asked_for() -> None:
    request = Counted([1, 2, 3, 1, 2, 3, 1, 2], 8)
    drafter = LookaheadDrafter(5, 4, 5)
    for most in range(40):
        (draft,) = proposed(drafter.propose([request], [most]))
        assert len(draft) <= most
    drafter.forget(request)


def test_a_pool_keeps_what_was_seen_last() -> None:
    pool = NgramPool(2)
    for rest in ((1, 1), (2, 2), (1, 1), (3, 3)):
        pool.add((9, *rest))
    assert pool.after(9) == [(3, 3), (1, 1)]
    assert pool.after(8) == []


@pytest.mark.usefixtures("open_gate")
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_guesses_come_true_without_any_draft(draft_engine: Path, temperature: float) -> None:
    """What the model's own window gives, beside n-grams of the text: more than one token a step, and no other text."""
    params = SamplingParams(max_tokens=120, temperature=temperature, seed=1)
    with load(draft_engine) as engine:
        expected = engine.generate("KING RICHARD:", params)[0].choices[0].token_ids
    with load(draft_engine, speculation={"method": "lookahead", "window": 7, "ngram": 3, "guesses": 7}) as engine:
        assert engine.generate("KING RICHARD:", params)[0].choices[0].token_ids == expected
        assert engine.loop.speculation is not None
        stats = engine.loop.speculation.stats
        assert stats.accepted_tokens > 0.2 * stats.drafts and stats.accepted_at[1] > 0
        assert engine.loop.pool.used == 0


def test_the_configuration() -> None:
    config = parse_speculative_config({"method": "lookahead"})
    assert isinstance(config, LookaheadConfig)
    assert (config.window, config.ngram, config.guesses, config.num_speculative_tokens) == (5, 3, 5, 20)
    assert parse_speculative_config({"method": "lookahead", "num_speculative_tokens": 9}).num_speculative_tokens == 9


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"window": 10, "ngram": 5, "guesses": 10}, "make 80 drafts a step, more than 63"),
        ({"ngram": 1}, "ngram cannot be 1"),
        ({"window": 0}, "window cannot be 0"),
        ({"level": 3}, "no key 'level'"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens cannot be 0"),
    ],
)
def test_what_is_refused(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(OptionError, match=problem):
        parse_speculative_config({"method": "lookahead", **values})
