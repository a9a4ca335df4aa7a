"""Forced continuations have the perplexity that they have as a part of a prompt, and policies are compared on them."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path

import pytest
from tokenizers import Tokenizer

import llmc
from benchmarks.forced_text import Logits, passages, prediction
from benchmarks.kv_policy_perplexity import EXACT, Bench, Figures, measured, table
from benchmarks.quality import build
from benchmarks.recall import NONE, TEXT
from benchmarks.recall_masks import RANDOM
from llmc.errors import OptionError
from tests.conftest import DRAFT

PROMPT, FORCED = 192, 16
H2O = "h2o:budget={budget},recent=16,every=16"


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench(DRAFT, passages(DRAFT / "tokenizer.json", TEXT, 2, PROMPT, FORCED), 1)


@pytest.fixture(scope="module")
def expected(bench: Bench) -> list[Logits]:
    return next(bench.logits(NONE, (1.0,), EXACT))


def test_passages_lie_evenly(bench: Bench) -> None:
    ids = Tokenizer.from_file(str(DRAFT / "tokenizer.json")).encode(TEXT.read_text(encoding="utf-8")).ids
    first, last = bench.texts
    assert [*first.prompt, *first.continuation] == ids[: PROMPT + FORCED]
    assert list(last.continuation) == ids[-FORCED:]


def test_without_compression_the_perplexity_is_that_of_a_prompt(
    bench: Bench, expected: list[Logits], tmp_path: Path
) -> None:
    """Within 0.01%: a step of one token may add in another order than a step of many."""
    build(DRAFT, tmp_path / "engine.llmc", "cpu", {"dtype": "float32"})
    with llmc.load(tmp_path / "engine.llmc", threads=1) as engine:
        lost = 0.0
        for text in bench.texts:
            (read,) = engine.generate([[*text.prompt, *text.continuation]], max_tokens=0, prompt_logprobs=0)
            assert read.prompt_logprobs is not None
            lost -= sum(each.logprob for each in read.prompt_logprobs[-FORCED:] if each is not None)
    found = prediction(bench.texts, expected, expected)
    assert found.perplexity == pytest.approx(math.exp(lost / (2 * FORCED)), rel=1e-4)
    assert (found.divergence, found.same) == (0.0, 1.0)


def test_requests_choose_the_budget(bench: Bench, expected: list[Logits]) -> None:
    half, third = measured(bench, H2O, (0.5, 1 / 3), EXACT, expected)
    assert (half.policy, third.policy) == (H2O.format(budget=96), H2O.format(budget=64))
    assert 0 < half.divergence < third.divergence


def test_random_rows_are_compared_with_the_same_logits(bench: Bench, expected: list[Logits]) -> None:
    all_rows, fewer = measured(bench, RANDOM, (1.0, 0.75), EXACT, expected)
    assert abs(all_rows.divergence) < 1e-6 < fewer.divergence


def test_a_policy_that_drops_nothing_says_nothing(bench: Bench, expected: list[Logits]) -> None:
    with pytest.raises(OptionError, match="drops nothing"):
        measured(bench, H2O, (2.0,), EXACT, expected)


def test_the_table_has_a_line_for_each_policy_and_cache() -> None:
    rows = [
        Figures(20.0, 0.0, 1.0, NONE, 1.0, EXACT),
        Figures(22.5, 0.25, 0.875, "h2o:budget=64", 0.5, EXACT),
        Figures(25.0, 0.5, 0.5, "h2o:budget=32", 0.25, EXACT),
    ]
    assert [Figures(**asdict(row)) for row in rows] == rows
    assert list(table(rows))[2:] == [
        "| `none` | auto | 20.00 | 0.0000 | 100% | 20.00 | 0.0000 | 100% |",
        "| `h2o` | auto | 22.50 | 0.2500 | 88% | 25.00 | 0.5000 | 50% |",
    ]
