"""`llmc models`: what compiles and what is refused, of some architectures."""

from __future__ import annotations

import json

import pytest

from tests.cli.command import assert_user_error, llmc


def test_one_that_compiles_and_one_that_is_refused() -> None:
    done = llmc("models", "llama", "doge", "--json")
    assert done.code == 0, done.err
    llama, doge = json.loads(done.out)
    assert llama["verdict"] == "matches" and llama["difference"] < 1e-3
    assert doge["verdict"] == "refused" and "DogeAttention of layer 0 passes its own mask" in doge["reason"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nope"], "has no causal architecture 'nope'"),
        (["llama", "--target", "nope"], "unknown target 'nope'"),
        (["llama", "--target", "h100"], "engines for h100 are not run here"),
    ],
)
def test_what_cannot_be_looked_at_is_an_error(words: list[str], said: str) -> None:
    assert_user_error(llmc("models", *words), said)
