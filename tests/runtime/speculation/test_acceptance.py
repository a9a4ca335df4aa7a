"""Rejection gives tokens the model's distribution, whatever is drafted; the forms of it that do not are found out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmc import Engine, SamplingParams, load
from llmc.errors import OptionError
from llmc.ops.sampling import draw_rows
from llmc.runtime.sampling.gumbel_noise import uniform_pairs
from llmc.runtime.sampling.sampler import Sampler
from llmc.runtime.speculation.acceptance import (
    Judged,
    Probabilities,
    Rejection,
    Tokens,
    Typical,
    is_typical,
    kept_or_redrawn,
)
from tests.quick_sample import quick_sample
from tests.runtime.tiny_engine import mild_model, write_tiny_engine

VOCABULARY = 16
DRAWS = 10**6
# Of χ² with 15 degrees of freedom, what one in a million exceeds.
MOST_CHI_SQUARE = 53.0

Judge = Callable[[Probabilities, Probabilities, Tokens, Probabilities], Tokens]


def distributions(seed: int) -> tuple[Probabilities, Probabilities, Probabilities]:
    """The model's, the drafter's, and the drafter's after one more token: [vocabulary] each; some tokens are filtered
    out of the first two."""
    rows = np.random.default_rng(seed).normal(size=(3, VOCABULARY)) * 1.2
    weights = np.exp(rows)
    weights[0, 3] = weights[1, 5] = weights[1, 6] = 0.0
    p, q, later = weights / weights.sum(axis=1, keepdims=True)
    return p, q, later


def drawn(q: Probabilities, count: int) -> Tokens:
    """From q, by its inverse distribution function."""
    uniforms = np.random.default_rng(1).random(count)
    return np.searchsorted(q.cumsum() / q.sum(), uniforms, side="right").clip(max=VOCABULARY - 1)


def chi_square(tokens: Tokens, p: Probabilities) -> float:
    """How far the tokens' frequencies are from p; infinite if one came that may not."""
    seen, expected = np.bincount(tokens, minlength=VOCABULARY), p * len(tokens)
    if seen[expected == 0].any():
        return float("inf")
    possible = expected > 0
    return float(((seen - expected)[possible] ** 2 / expected[possible]).sum())


def redrawn_from_p(p: Probabilities, q: Probabilities, drafts: Tokens, uniforms: Probabilities) -> Tokens:
    """The widespread fault: what is refused is drawn from p, which has had its chance already."""
    rows = np.arange(len(drafts))
    kept = uniforms[:, 0] * q[rows, drafts] < p[rows, drafts]
    again = (p.cumsum(axis=1) <= uniforms[:, 1:]).sum(axis=1)
    return np.where(kept, drafts, again)


def without_q(p: Probabilities, q: Probabilities, drafts: Tokens, uniforms: Probabilities) -> Tokens:
    """As if drafts had been certain (vllm#40149)."""
    certain = np.zeros_like(p)
    certain[np.arange(len(drafts)), drafts] = 1.0
    return kept_or_redrawn(p, certain, drafts, uniforms)


def judged(judge: Judge, p: Probabilities, q: Probabilities, drafts: Tokens) -> Tokens:
    """With the random numbers of as many requests."""
    chosen = []
    for begin in range(0, len(drafts), 100_000):
        part = drafts[begin : begin + 100_000]
        seeds = np.arange(begin, begin + len(part))
        rows = len(part), VOCABULARY
        chosen.append(
            judge(
                np.broadcast_to(p, rows),
                np.broadcast_to(q, rows),
                part,
                uniform_pairs(seeds, np.full(len(part), 5)),
            )
        )
    return np.concatenate(chosen)


@pytest.mark.parametrize("seed", quick_sample([0, 1], [0]))
def test_a_million_draws_have_the_distribution_of_the_model(seed: int) -> None:
    p, q, _ = distributions(seed)
    tokens = judged(kept_or_redrawn, p, q, drawn(q, DRAWS))
    assert chi_square(tokens, p) < MOST_CHI_SQUARE
    kept = (tokens == drawn(q, DRAWS)).mean()
    assert kept == pytest.approx(np.minimum(p, q).sum(), abs=0.01), "as many drafts count as can"


@pytest.mark.parametrize("seed", quick_sample([0, 1], [0]))
def test_drawing_again_from_the_model_is_found_out(seed: int) -> None:
    p, q, _ = distributions(seed)
    assert chi_square(judged(redrawn_from_p, p, q, drawn(q, DRAWS)), p) > 100 * MOST_CHI_SQUARE


@pytest.mark.parametrize("seed", quick_sample([0, 1], [0]))
def test_the_drafters_distribution_after_the_draft_is_found_out(seed: int) -> None:
    """q is that from which the draft was drawn, not the next one."""
    p, q, later = distributions(seed)
    assert chi_square(judged(kept_or_redrawn, p, later, drawn(q, DRAWS)), p) > 100 * MOST_CHI_SQUARE


@pytest.mark.parametrize("seed", quick_sample([0, 1], [0]))
def test_leaving_the_drafters_distribution_out_of_account_is_found_out(seed: int) -> None:
    p, q, _ = distributions(seed)
    tokens = judged(without_q, p, q, drawn(q, DRAWS))
    assert (tokens == drawn(q, DRAWS)).mean() < 0.8 * np.minimum(p, q).sum()


def test_the_noise_of_drafts_says_nothing_about_whether_they_count() -> None:
    """Both follow from the request's seed and its count of tokens."""
    p, q, _ = distributions(2)
    count = 100_000
    with np.errstate(divide="ignore"):
        logits = torch.from_numpy(np.log(q)).float().expand(count, VOCABULARY)
    seeds, counters = torch.arange(count, dtype=torch.int32), torch.full((count,), 5, dtype=torch.int32)
    drafts = draw_rows(logits, torch.ones(count), seeds, counters)[0].long().numpy()
    assert chi_square(drafts, q) < MOST_CHI_SQUARE
    assert chi_square(judged(kept_or_redrawn, p, q, drafts), p) < MOST_CHI_SQUARE


def test_a_certain_draft_counts_as_often_as_the_model_says_it() -> None:
    """Those of n-grams: what is left for others is p without it."""
    p, _, _ = distributions(3)
    q = np.zeros(VOCABULARY)
    q[7] = 1.0
    tokens = judged(kept_or_redrawn, p, q, np.full(DRAWS, 7))
    assert chi_square(tokens, p) < MOST_CHI_SQUARE


def test_the_same_seed_and_count_judge_alike() -> None:
    seeds, counters = np.array([-5, 7, 7, 2**31 - 1]), np.array([3, 3, 4, 0])
    together = uniform_pairs(seeds, counters)
    alone = [uniform_pairs(seeds[i : i + 1], counters[i : i + 1]) for i in range(4)]
    assert (together == np.concatenate(alone)).all()
    assert len(np.unique(together)) == together.size and (together > 0).all() and (together < 1).all()


def sampler(**params: Any) -> Sampler:
    return Sampler(SamplingParams(temperature=1.0, seed=3, **params), np.array([1]), VOCABULARY, np.zeros(0, np.int64))


def test_what_the_request_filters_out_never_comes() -> None:
    """p is what is left of the model's distribution after penalties, bias and filters."""
    logits = np.random.default_rng(0).normal(size=VOCABULARY).astype(np.float32)
    allowed = set(np.argsort(logits)[-4:].tolist())
    filtering = sampler(top_k=4)
    for _ in range(200):
        uniform = np.full(VOCABULARY, 1 / VOCABULARY)
        (token,) = Rejection().tokens([Judged(filtering, logits, int(logits.argmin()), uniform)])
        assert token in allowed
    biased = sampler(logit_bias={int(logits.argmin()): 100.0})
    assert Rejection().tokens([Judged(biased, logits, int(logits.argmin()), None)]) == [int(logits.argmin())]


def test_unusable_logits_end_one_request_and_not_its_neighbour() -> None:
    good = np.zeros(VOCABULARY, np.float32)
    good[4] = 50.0
    bad = np.full(VOCABULARY, np.nan, np.float32)
    for method in (Rejection(), Typical(0.09, 0.3)):
        failed, token = method.tokens([Judged(sampler(), bad, 4, None), Judged(sampler(), good, 4, None)])
        assert isinstance(failed, Exception) and token == 4


@pytest.mark.parametrize(
    ("p", "draft", "counts"),
    [
        ([0.7, 0.2, 0.05, 0.05], 1, True),
        ([0.7, 0.2, 0.05, 0.05], 2, False),
        ([0.25, 0.25, 0.25, 0.25], 2, True),
        ([0.97, 0.01, 0.01, 0.01], 1, False),
    ],
)
def test_typical_drafts_are_likely_for_their_entropy(p: list[float], draft: int, counts: bool) -> None:
    assert is_typical(np.array([p]), np.array([draft]), 0.09, 0.3).tolist() == [counts]


def test_a_flat_distribution_lowers_the_threshold() -> None:
    """Of a thousand equals each has 0.001, and exp(-entropy) is as much."""
    flat, draft = np.full((1, 1000), 0.001), np.array([4])
    assert is_typical(flat, draft, 0.09, 0.3).all()
    assert not is_typical(flat, draft, 0.09, 1.5).any()
    assert is_typical(flat, draft, 0.0005, 1.5).all()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_engine(tmp_path_factory.mktemp("engine") / "mild.llmc", model=mild_model())


def speculating(path: Path, second: Path, method: str) -> Engine:
    given = {"method": "draft_model", "model": str(second), "num_speculative_tokens": 3}
    return load(path, speculation={**given, "rejection_sample_method": method})


RANDOM: dict[str, Any] = {"temperature": 1.0, "top_k": 40, "presence_penalty": 0.5}


@pytest.mark.usefixtures("open_gate")
def test_drafts_of_the_same_model_all_count(path: Path) -> None:
    """Each is compared with what it was drawn from, in its own row, with the request's own parameters."""
    with speculating(path, path, "rejection") as engine:
        engine.generate([[1, 2, 3], [7] * 9], max_tokens=30, seed=4, **RANDOM)
        assert engine.loop.speculation is not None
        counts = engine.loop.speculation.stats
    assert counts.accepted_tokens == counts.draft_tokens > 20


@pytest.mark.usefixtures("open_gate")
@pytest.mark.parametrize("method", ["rejection", "typical"])
def test_a_seed_gives_the_same_answer_at_the_same_load_and_greedy_ones_never_change(
    path: Path, tmp_path: Path, method: str
) -> None:
    second = write_tiny_engine(tmp_path / "second.llmc", model=mild_model(1))
    with load(path) as engine:
        plain = engine.generate([1, 2, 3], max_tokens=30)[0]
        drawn = engine.generate([1, 2, 3], max_tokens=30, seed=4, **RANDOM)[0]
    with speculating(path, second, method) as engine:
        assert engine.generate([1, 2, 3], max_tokens=30)[0].token_ids == plain.token_ids
        first, again = (engine.generate([1, 2, 3], max_tokens=30, seed=4, **RANDOM)[0] for _ in range(2))
    assert first.token_ids == again.token_ids
    assert method == "typical" or first.token_ids != drawn.token_ids, "they are other answers than without drafts"


@pytest.mark.parametrize("method", ["rejection", "typical"])
def test_a_cache_of_answers_wants_answers_that_do_not_depend_on_load(path: Path, method: str) -> None:
    given = {"method": "ngram", "num_speculative_tokens": 3, "rejection_sample_method": method}
    with pytest.raises(OptionError, match=f"depend on load with the rejection_sample_method '{method}'"):
        load(path, speculation=given, output_cache_bytes=1000)
