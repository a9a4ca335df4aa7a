"""`llmc chat` where a conversation fills the context: old turns are left out or summed up, and cut answers say so."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pytest

import llmc
from llmc.cli.conversation import Conversation, WhenFull
from llmc.cli.conversation_prompt import conversation_prompt
from llmc.errors import RequestError
from llmc.runtime.engine import Engine
from tests.cli.command import llmc as command

SETTINGS = {"max_tokens": 8, "temperature": 0.0}


@pytest.fixture(scope="module")
def engine(draft_engine: Path) -> Iterator[Engine]:
    with llmc.load(draft_engine) as opened:
        yield opened


def conversation(engine: Engine, when_full: WhenFull) -> Conversation:
    return Conversation(conversation_prompt(engine, "plain"), SETTINGS, "Be brief.", when_full)


def ask(talk: Conversation, text: str) -> str | None:
    """Say that and note the answer; returns what was told of the room."""
    talk.turns.append({"role": "user", "content": text})
    told = talk.make_room()
    talk.turns.append({"role": "assistant", "content": "".join(piece.text for piece in talk.answer())})
    return told


def fill(talk: Conversation) -> str:
    """Talk until something is told of the room."""
    for number in range(1000):
        told = ask(talk, f"Tell me of king number {number}, and of his horse.")
        if told is not None:
            return told
    raise AssertionError("the context is never full")


@pytest.mark.parametrize("when_full", [WhenFull.SHIFT, WhenFull.SUMMARIZE])
def test_the_oldest_turns_are_left_out(engine: Engine, when_full: WhenFull) -> None:
    talk = conversation(engine, when_full)
    told = fill(talk)
    assert f"the oldest {talk.first} messages" in told and talk.first > 0
    shown = talk.shown()
    assert talk.tokens(shown) <= talk.limit < talk.tokens(talk.messages()) + SETTINGS["max_tokens"]
    assert shown[0]["role"] == "system" and shown[0]["content"].startswith("Be brief.")
    assert shown[1:] == talk.turns[talk.first :] and shown[1]["role"] == "user"
    if when_full is WhenFull.SUMMARIZE:
        assert talk.summary and talk.summary in shown[0]["content"] and "summarized" in told
    else:
        assert talk.summary is None and shown[0]["content"] == "Be brief."
    # The room that was made lasts for a while, so that the cache is of use.
    assert ask(talk, "And then?") is None
    talk.forget(0)
    assert talk.shown() == [{"role": "system", "content": "Be brief."}]


def test_stop_refuses_what_does_not_fit(engine: Engine) -> None:
    talk = conversation(engine, WhenFull.STOP)
    with pytest.raises(RequestError, match="the conversation has") as caught:
        fill(talk)
    assert "--when-full shift" in (caught.value.fix or "")
    shifting = conversation(engine, WhenFull.SHIFT)
    shifting.turns.append({"role": "user", "content": "O king! " * talk.limit})
    with pytest.raises(RequestError, match="the message has"):
        shifting.make_room()


def test_a_cut_answer_says_so(draft_engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Good morrow\n"))
    out = command("chat", draft_engine, "--max-tokens", "3", "--temperature", "0").out
    assert "(cut after 3 tokens: /set max_tokens 6 allows more)" in out
