"""What may come is chosen on the command line as in Python, before anything is built."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmc.cli.sampling_options import SamplingOptions, TokenOptions
from llmc.runtime.sampling.sampling_params import SamplingParams
from tests.cli.command import assert_user_error, llmc
from tests.runtime.tiny_engine import mild_model, write_tiny_engine


def test_options_are_the_parameters_of_the_same_name() -> None:
    given = SamplingOptions(
        max_tokens=9,
        temperature=0.5,
        typical_p=0.9,
        dry_multiplier=0.8,
        dry_sequence_breakers=["\n"],
        dry_penalty_last_n=64,
        bad_words=["thee", "thou"],
        allowed_token_ids="5,6, 7",
        stop=["."],
    )
    assert given.params() == SamplingParams(
        max_tokens=9,
        temperature=0.5,
        typical_p=0.9,
        dry_multiplier=0.8,
        dry_sequence_breakers=("\n",),
        dry_penalty_last_n=64,
        bad_words=("thee", "thou"),
        allowed_token_ids=(5, 6, 7),
        stop=(".",),
    )
    assert SamplingOptions().params() == SamplingParams()
    assert TokenOptions().values() == {}


def test_an_engine_follows_them(tmp_path: Path) -> None:
    path = write_tiny_engine(tmp_path / "e.llmc", model=mild_model(1, 4096), with_tokenizer=True)
    prompt = ("run", path, "--prompt", "Once", "--max-tokens", "6")
    plain, banned = llmc(*prompt), llmc(*prompt, "--allowed-token-ids", "100,101", "--dry-multiplier", "1")
    assert plain.code == banned.code == 0
    assert plain.out != banned.out


@pytest.mark.parametrize("verb", ["run", "chat"])
def test_what_cannot_be_is_refused_before_the_engine_is_opened(verb: str) -> None:
    assert_user_error(llmc(verb, "nowhere", "--allowed-token-ids", "the"), "token ids cannot be 'the'", "1,2,3")
    assert_user_error(llmc(verb, "nowhere", "--typical-p", "2"), "--typical-p cannot be 2.0", "above 0 to 1")
