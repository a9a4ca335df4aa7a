"""Windows of a text for perplexity: each is a text of its own, with the special tokens that come before one."""

from __future__ import annotations

import pytest

from llmc.debug.compare import windows


def test_a_text_is_cut_without_gaps() -> None:
    assert windows(range(7), 3) == [[0, 1, 2], [3, 4, 5]], "one token predicts nothing"
    assert windows(range(8), 3) == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert windows(range(8), 3, limit=1) == [[0, 1, 2]]


@pytest.mark.parametrize("has_prefix", [True, False])
def test_each_window_begins_with_the_prefix(has_prefix: bool) -> None:
    text = [*([90, 91] if has_prefix else []), *range(7)]
    assert windows(text, 5, prefix=[90, 91]) == [[90, 91, 0, 1, 2], [90, 91, 3, 4, 5], [90, 91, 6]]


def test_a_window_has_a_token_of_the_text_however_long_the_prefix_is() -> None:
    assert windows([5, 6], 2, prefix=[90, 91, 92]) == [[90, 91, 92, 5], [90, 91, 92, 6]]


def test_an_empty_text_has_no_windows() -> None:
    assert windows([90], 4, prefix=[90]) == []
