"""llmc_choose_rows draws from the distribution that the sampler in numpy defines, each row for itself."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.ops import sampling
from llmc.runtime.sampling.logit_edits import AllowedTokens
from llmc.runtime.sampling.row_choice import BEST, EVERY_TOKEN, RowChoice, RowChoices
from llmc.runtime.sampling.sampler import DrawRows, Sampler
from llmc.runtime.sampling.sampler import choose as choose_tokens
from llmc.runtime.sampling.sampling_params import SamplingParams
from llmc.runtime.sampling.token_filters import candidates
from llmc.targets import CpuTarget
from tests.codegen.cpp.kernel_calls import call, kernels
from tests.codegen.cpp.runnable_targets import QUICKLY_RUNNABLE, RUNNABLE

Rows = npt.NDArray[np.float32]
NUMBERS = ("temperature", "top_k", "top_p", "min_p", "seeds", "counters")


def choose(
    target: CpuTarget, logits: Rows, choices: list[RowChoice], threads: int = 2
) -> tuple[list[int], list[float]]:
    rows, vocabulary = logits.shape
    numbers = RowChoices.of(choices)
    tokens, scores = np.full(rows, -1, np.int32), np.zeros(rows, np.float32)
    arrays = {"logits": logits, **{name: getattr(numbers, name) for name in NUMBERS}}
    arrays |= {"tokens": tokens, "scores": scores}
    values = {"rows": rows, "vocabulary": vocabulary} | {name: a.ctypes.data for name, a in arrays.items()}
    scratch = kernels(target).llmc_choose_rows_scratch(vocabulary)
    call(target, "choose_rows", [], values, threads=threads, scratch=scratch)
    return tokens.tolist(), scores.tolist()


def random_rows(rows: int, vocabulary: int, seed: int = 0) -> Rows:
    return np.random.default_rng(seed).normal(0, 3, (rows, vocabulary)).astype(np.float32)


def choice(params: SamplingParams, counter: int) -> RowChoice:
    top_k = EVERY_TOKEN if params.top_k is None else params.top_k
    return RowChoice(params.temperature, top_k, params.top_p, params.min_p, -7, counter)


@pytest.mark.parametrize("target", RUNNABLE)
@pytest.mark.parametrize("vocabulary", [1, 7, 512, 1021, 5000])
def test_temperature_zero_takes_the_lowest_of_the_largest(target: CpuTarget, vocabulary: int) -> None:
    logits = np.round(random_rows(5, vocabulary))
    logits[3, vocabulary // 2] = logits[4, 0] = np.inf
    logits[4, -1] = np.nan
    tokens, scores = choose(target, logits, [BEST] * 5)
    assert tokens == [*logits[:3].argmax(1).tolist(), vocabulary // 2, vocabulary - 1]
    np.testing.assert_array_equal(scores, [*logits[:3].max(1), np.inf, np.nan])


@pytest.mark.parametrize("target", RUNNABLE)
def test_an_unusable_row_is_told_by_its_score(target: CpuTarget) -> None:
    logits = random_rows(4, 1500)
    logits[0, 1400] = np.nan
    logits[1] = -np.inf
    logits[2, 7] = -np.inf
    logits[3, 1300] = np.inf
    tokens, scores = choose(target, logits, [choice(SamplingParams(temperature=1.0, top_p=0.9), 0)] * 4)
    np.testing.assert_array_equal(scores, [np.nan, -np.inf, logits[2].max(), np.inf])
    assert (tokens[0], tokens[3]) == (1400, 1300), "the first at fault"


@pytest.mark.parametrize("target", RUNNABLE)
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=2.0),
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=1e6),
        SamplingParams(temperature=1.5, top_k=5),
        SamplingParams(temperature=1.5, top_k=11, top_p=0.8),
        SamplingParams(temperature=3.0, top_p=0.6),
        SamplingParams(temperature=3.0, top_p=0.95, min_p=0.02),
        SamplingParams(temperature=2.0, min_p=0.1),
    ],
    ids=str,
)
def test_draws_follow_the_samplers_distribution(target: CpuTarget, params: SamplingParams) -> None:
    """At 1,300 tokens, of which only some are likely: three blocks."""
    logits = random_rows(1, 1300)[0]
    logits[100:1200] -= 30 if params.temperature < 100 else 0
    ids, weights = candidates(logits, int(logits.argmax()), params)
    expected = np.zeros(1300)
    expected[slice(None) if ids is None else ids] = weights / weights.sum()
    draws = 6000
    tokens, _ = choose(target, np.tile(logits, (draws, 1)), [choice(params, i) for i in range(draws)])
    seen = np.bincount(tokens, minlength=1300)
    assert not seen[expected == 0].any()
    # Twenty groups of like likely tokens; chi-square of 19 degrees of freedom is above 50 once in ten thousand.
    order = np.argsort(-expected)
    upto = np.cumsum(expected[order])
    groups = np.minimum((upto * 20).astype(int), 19)
    wanted = np.bincount(groups, expected[order], minlength=20) * draws
    counts = np.bincount(groups, seen[order], minlength=20)
    assert ((counts - wanted) ** 2 / np.maximum(wanted, 1)).sum() < 50


@settings(max_examples=60)
@given(
    vocabulary=st.sampled_from((1, 3, 600, 2048)),
    seed=st.integers(0, 999),
    temperature=st.floats(0.05, 5),
    top_k=st.none() | st.integers(1, 1500),
    top_p=st.floats(0.01, 1),
    min_p=st.sampled_from((0.0, 0.0, 0.01, 0.5, 1.0)),
    coarse=st.booleans(),
)
def test_only_what_survives_the_filters_comes(
    vocabulary: int, seed: int, temperature: float, top_k: int | None, top_p: float, min_p: float, coarse: bool
) -> None:
    """Also of rows full of equal logits, and near the edges of what is kept."""
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    logits = random_rows(1, vocabulary, seed)[0]
    if coarse:
        logits = np.round(logits)
    best = int(logits.argmax())
    # One that loses nothing to rounding at the edge.
    wider = SamplingParams(temperature=temperature, top_k=top_k, top_p=min(1.0, top_p + 1e-5), min_p=min_p * 0.9999)
    ids, _ = candidates(logits, best, wider)
    kept = np.arange(vocabulary) if ids is None else ids
    choices = [choice(params, i) for i in range(64)]
    tokens, _ = choose(QUICKLY_RUNNABLE[-1], np.tile(logits, (64, 1)), choices)
    assert set(tokens) <= set(kept.tolist())


def test_a_row_depends_on_itself_only() -> None:
    logits = random_rows(40, 3000)
    kinds = (
        BEST,
        RowChoice(0.8, EVERY_TOKEN, 1.0, 0.0, 5, 1),
        RowChoice(0.8, 50, 1.0, 0.0, 5, 2),
        RowChoice(0.8, EVERY_TOKEN, 0.9, 0.0, 5, 3),
    )
    choices = [kinds[i % 4] for i in range(40)]
    for target in QUICKLY_RUNNABLE:
        together, _ = choose(target, logits, choices, threads=3)
        assert together == [choose(target, logits[i : i + 1], choices[i : i + 1], threads=1)[0][0] for i in range(40)]


@pytest.mark.parametrize("target", RUNNABLE)
def test_the_sampler_in_numpy_draws_the_same_tokens(target: CpuTarget) -> None:
    """To the last one: a score's digits are double, and filters that agree keep the same tokens."""
    logits = random_rows(60, 3000)
    none = np.zeros(0, np.int64)
    for params in (
        SamplingParams(temperature=1.0, seed=3),
        SamplingParams(temperature=0.8, seed=4, top_k=40, top_p=0.9),
        SamplingParams(temperature=2.0, seed=5, top_p=0.7, min_p=0.01),
        SamplingParams(temperature=1e4, seed=6),
        SamplingParams(temperature=1e4, seed=7, min_p=1e-3),
    ):
        sampler = Sampler(params, none, 3000, none)
        choices, expected = [], []
        for row in logits:
            row_choice = sampler.choice()
            assert row_choice is not None
            choices.append(row_choice)
            expected.append(sampler.sample(row))
        tokens, _ = choose(target, logits, choices)
        assert tokens == expected, params


def test_rows_that_the_host_changed_are_drawn_as_the_sampler_does() -> None:
    """With penalties that change from token to token, and one row for which no token is allowed."""
    target, logits, none = QUICKLY_RUNNABLE[-1], random_rows(4, 700), np.zeros(0, np.int64)
    kinds = (
        SamplingParams(temperature=0.9, seed=1, presence_penalty=1.5),
        SamplingParams(temperature=2.0, seed=2, frequency_penalty=0.5, top_p=0.9, logit_bias={3: 4.0}),
        SamplingParams(temperature=0.7, seed=3, typical_p=0.5, repetition_penalty=1.3),
        SamplingParams(temperature=0.7, seed=4, allowed_token_ids=(5,), min_tokens=9),
    )

    def drawn(draw: DrawRows | None) -> list[list[object]]:
        samplers = [
            Sampler(
                kind,
                none,
                700,
                np.array([5]),
                edits=[AllowedTokens(np.array(ids))] if (ids := kind.allowed_token_ids) else (),
            )
            for kind in kinds
        ]
        rows = [choose_tokens(samplers, logits, draw) for _ in range(30)]
        return [[token if isinstance(token, int) else str(token) for token in row] for row in rows]

    def by_kernel(rows: Rows, choices: RowChoices) -> npt.NDArray[np.int32]:
        of_rows = [RowChoice(*(getattr(choices, name)[i].item() for name in NUMBERS)) for i in range(len(rows))]
        return np.array(choose(target, rows, of_rows)[0], np.int32)

    outcomes = drawn(by_kernel)
    assert outcomes == drawn(None)
    assert "no token is allowed next" in str(outcomes[0][3]) and len({row[0] for row in outcomes}) > 5


@pytest.mark.parametrize("target", RUNNABLE)
@pytest.mark.parametrize("vocabulary", [5, 1000, 4097])
def test_draws_are_those_of_the_gpu(target: CpuTarget, vocabulary: int) -> None:
    """Of one seed and count, the kernel and the reference of the GPU's draw the same tokens."""
    logits = random_rows(200, vocabulary)
    seeds, counters = torch.arange(-100, 100, dtype=torch.int32), torch.arange(200, dtype=torch.int32) * 7
    choices = [RowChoice(0.9, EVERY_TOKEN, 1.0, 0.0, int(s), int(c)) for s, c in zip(seeds, counters, strict=True)]
    drawn, _ = sampling.draw_rows(torch.from_numpy(logits), torch.full((200,), 0.9), seeds, counters)
    assert choose(target, logits, choices)[0] == drawn.tolist()
    limited = [choice._replace(top_k=min(5, vocabulary)) for choice in choices]
    values, indices = sampling.top_k_rows(torch.from_numpy(logits), min(20, vocabulary))
    ones = torch.ones(200)
    tokens, _ = sampling.sample_candidates(
        values,
        indices,
        ones,
        drawn,
        ones * 0.9,
        torch.full((200,), 5).int(),
        ones,
        ones * 0,
        seeds,
        counters,
        vocabulary < 20,
    )
    assert choose(target, logits, limited)[0] == tokens.tolist()
