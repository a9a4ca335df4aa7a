"""`llmc models`: what compiles and what is refused, of some architectures."""

from __future__ import annotations

import json

import pytest

import llmc.architectures.survey
from llmc.architectures.survey import Outcome, Verdict
from tests.cli.command import assert_user_error
from tests.cli.command import llmc as run


def test_one_that_compiles_and_one_that_is_refused() -> None:
    done = run("models", "llama", "doge", "--json")
    assert done.code == 0, done.err
    llama, doge = json.loads(done.out)
    assert llama["verdict"] == "matches" and llama["difference"] < 1e-3
    assert doge["verdict"] == "refused" and "DogeAttention of layer 0 passes its own mask" in doge["reason"]


def test_reasons_are_no_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "size [1, s18] of [/root] and [bold]x (model.py:7: y[:, 0])"

    def refused(model_type: str, class_name: str, target: str) -> Outcome:
        return Outcome(model_type, class_name, Verdict.REFUSED, reason=reason)

    monkeypatch.setattr(llmc.architectures.survey, "survey", refused)
    done = run("models", "llama")
    assert done.code == 0, done.err
    assert "".join(reason.split()) in "".join(done.out.replace("│", "").split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nope"], "has no causal architecture 'nope'"),
        (["llama", "--target", "nope"], "unknown target 'nope'"),
        (["llama", "--target", "h100"], "this machine cannot run engines for h100"),
    ],
)
def test_what_cannot_be_looked_at_is_an_error(words: list[str], said: str) -> None:
    assert_user_error(run("models", *words), said)
