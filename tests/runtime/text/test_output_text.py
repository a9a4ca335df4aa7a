"""Text that grows token by token: whole characters, stop strings across tokens, the same text as decoded at once."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from llmc.runtime.text.output_text import OutputText
from tests.runtime.tiny_engine import TOKENIZER

bard = Tokenizer.from_file(str(TOKENIZER))


def decode(ids: Sequence[int]) -> str:
    text: str = bard.decode(ids, skip_special_tokens=True)
    return text


def streamed(ids: Sequence[int], stop: tuple[str, ...] = ()) -> tuple[list[str], OutputText]:
    text = OutputText(decode, stop)
    pieces = []
    for i, token in enumerate(ids):
        text.add(token)
        if text.stopped or i == len(ids) - 1:
            text.finish()
            pieces.append(text.read())
            break
        pieces.append(text.read())
    return pieces, text


@settings(max_examples=200)
@given(st.text(min_size=1, max_size=40))
def test_pieces_are_whole_characters_and_sum_to_the_text(content: str) -> None:
    pieces, text = streamed(bard.encode(content).ids)
    assert "".join(pieces) == text.text() == decode(bard.encode(content).ids)
    if "�" not in content:
        assert not any("�" in piece for piece in pieces)


@settings(max_examples=200)
@given(st.lists(st.integers(0, 4095), min_size=1, max_size=60))
def test_any_tokens_sum_to_the_text(ids: list[int]) -> None:
    pieces, text = streamed(ids)
    assert "".join(pieces) == text.text() == decode(ids)


@settings(max_examples=200)
@given(st.lists(st.sampled_from([*bard.encode("the end. Two\nlines: ende").ids]), min_size=1, max_size=30), st.data())
def test_text_ends_before_the_first_stop_string(ids: list[int], data: st.DataObject) -> None:
    whole = decode(ids)
    start = data.draw(st.integers(0, len(whole) - 1))
    stop = (whole[start : start + data.draw(st.integers(1, 6))], "never there")
    pieces, text = streamed(ids, stop)
    assert text.stopped
    assert "".join(pieces) == text.text() == whole[: whole.index(stop[0])]


def test_what_may_become_a_stop_string_is_held_back() -> None:
    text = OutputText(decode, ("end.",))
    read = []
    for token in bard.encode("the en").ids:
        text.add(token)
        read.append(text.read())
    assert "".join(read) == "the "
    text.finish()
    assert text.read() == "en"


def test_a_long_character_comes_out_once_whole() -> None:
    ids = bard.encode("a\N{GRINNING FACE}b").ids
    pieces, _ = streamed(ids)
    assert "\N{GRINNING FACE}" in pieces or "\N{GRINNING FACE}b" in pieces
    assert len(ids) > 3, "the character takes several tokens"


@pytest.mark.parametrize("stop", [("b",), ("ab", "b"), ("abc",)])
def test_the_earliest_of_several_stops_wins(stop: tuple[str, ...]) -> None:
    text = OutputText(lambda ids: "".join(chr(i) for i in ids), stop)
    for character in "xaabc":
        text.add(ord(character))
    assert text.stopped
    assert text.text() == "xaabc"[: min(at for s in stop if (at := "xaabc".find(s)) >= 0)]
