"""Choosing tokens on the device: the largest, the k largest, and a draw among them, as the references do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

from llmc.codegen.triton.kernel import KernelTemplate
from llmc.codegen.triton.kernels.sampling.draw_rows import argmax_rows, draw_rows
from llmc.codegen.triton.kernels.sampling.row_masses import row_masses
from llmc.codegen.triton.kernels.sampling.sample_candidates import sample_candidates
from llmc.codegen.triton.kernels.sampling.top_k_rows import top_k_rows
from llmc.graph.refusal import Refusal
from llmc.ops import sampling
from llmc.runtime.sampling.sampling_params import SamplingParams
from llmc.runtime.sampling.token_filters import candidates as host_candidates
from tests.codegen.triton.tensor_call import TensorCall, check
from tests.gpu_target import gpu_target

H100 = gpu_target("h100")
VOCABULARIES = [1, 7, 2048, 4097, 32003]


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_argmax(device: str, vocabulary: int) -> None:
    check(argmax_rows, _logits(5, vocabulary), device=device, tolerance=0.0)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("k", [1, 5, 64])
def test_top_k(device: str, vocabulary: int, k: int) -> None:
    check(top_k_rows, _logits(3, vocabulary), min(k, vocabulary), device=device, tolerance=0.0)


def test_equals_are_taken_by_index(device: str) -> None:
    logits = _logits(4, 5000).round().clamp_max(1.0)
    logits[1] = 0.0
    logits[1, ::3] = -0.0
    logits[2] = -5.0
    check(argmax_rows, logits, device=device, tolerance=0.0)
    check(top_k_rows, logits, 64, device=device, tolerance=0.0)


def test_forbidden_tokens_come_last(device: str) -> None:
    logits = _logits(1, 2100)
    logits[0, torch.randperm(2100)[:2090]] = -3.0e38
    check(top_k_rows, logits, 16, device=device, tolerance=0.0)
    logits[0, 1:] = float("-inf")
    check(argmax_rows, logits, device=device, tolerance=0.0)


def test_extremes_of_fp32_keep_their_order(device: str) -> None:
    logits = torch.tensor([[1e-45, -1e-45, 3.4e38, -3.4e38, 0.0, 1.0, -1.0, 1e-20]])
    check(top_k_rows, logits, 8, device=device, tolerance=0.0)


def test_unusable_logits_show_in_the_score(device: str) -> None:
    logits = _logits(3, 5000)
    logits[0, 4500], logits[1], logits[2, 7] = float("nan"), float("-inf"), float("inf")
    call = TensorCall(argmax_rows, (logits,), sampling.argmax_rows(logits), device, in_place=False)
    (launch,) = call.candidates()
    for step in (launch, *launch.then):
        call.run(step)
    inf = float("inf")
    assert call.results[1].tolist() == [inf, -inf, inf] == sampling.argmax_rows(logits)[1].tolist()
    assert call.results[0].tolist()[0] == 4500 and call.results[0].tolist()[2] == 7


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_draws(device: str, vocabulary: int) -> None:
    temperature = torch.tensor([0.0, 0.7, 1.0, 2.5, 1e-3, 100.0])
    seeds = torch.tensor([1, -5, 7, 2**31 - 1, 0, 3], dtype=torch.int32)
    counters = torch.tensor([0, 1, 2, 3, 100000, 5], dtype=torch.int32)
    check(draw_rows, _logits(6, vocabulary), temperature, seeds, counters, device=device, tolerance=1e-6)


@pytest.mark.parametrize("vocabulary", [5, 4097, 32003])
def test_masses(device: str, vocabulary: int) -> None:
    logits = _logits(4, vocabulary)
    values, _ = sampling.top_k_rows(logits, 5)
    temperature = torch.tensor([1.0, 0.0, 0.2, 3.0])
    check(row_masses, logits, values, temperature, device=device, tolerance=1e-6)


@pytest.mark.parametrize("vocabulary", [50, 300])
def test_samples_with_every_filter(device: str, vocabulary: int) -> None:
    rows = 64
    logits = _logits(rows, vocabulary) * 3
    arguments = _filtered(logits, 50)
    check(sample_candidates, *arguments, vocabulary == 50, device=device, tolerance=0.0)
    covered = torch.ops.llmc.sample_candidates.default(*arguments, vocabulary == 50)[1]
    assert covered.all() == (vocabulary == 50) and covered.any()


def _filtered(logits: Tensor, k: int) -> tuple[Tensor, ...]:
    """The arguments of sample_candidates for rows with all kinds of filters."""
    rows = len(logits)
    values, indices = sampling.top_k_rows(logits, k)
    generator = torch.Generator().manual_seed(3)
    temperature = torch.rand(rows, generator=generator) * 2
    temperature[::7] = 0.0
    top_k = torch.randint(1, 80, (rows,), generator=generator).int()
    top_k[::4] = sampling.EVERY_TOKEN
    top_p, min_p = torch.rand(rows, generator=generator), torch.rand(rows, generator=generator) * 0.1
    top_p[::3], min_p[::2] = 1.0, 0.0
    seeds = torch.randint(-(2**31), 2**31, (rows,), generator=generator).int()
    counters = torch.arange(rows).int()
    masses = sampling.row_masses(logits, values, temperature)
    drawn, _ = sampling.draw_rows(logits, temperature, seeds, counters)
    return values, indices, masses, drawn, temperature, top_k, top_p, min_p, seeds, counters


def test_covered_rows_keep_what_the_host_keeps() -> None:
    """With one seed after the other, the tokens drawn of a covered row are the host's candidates, as often."""
    logits = _logits(1, 300) * 2
    checked = 0
    for filters in ({"top_k": 7}, {"top_k": 40, "top_p": 0.6}, {"top_p": 0.5}, {"min_p": 0.1}, {"top_p": 0.9}, {}):
        params = SamplingParams(temperature=0.8, **filters)
        ids, weights = host_candidates(logits[0].numpy(), int(logits.argmax()), params)
        draws = 3000
        many = logits.expand(draws, -1).contiguous()
        values, indices = sampling.top_k_rows(many, 64)
        temperature, counters = torch.full((draws,), 0.8), torch.arange(draws, dtype=torch.int32)
        seeds = torch.full((draws,), 11, dtype=torch.int32)
        drawn, _ = sampling.draw_rows(many, temperature, seeds, counters)
        tokens, covered = sampling.sample_candidates(
            values, indices, sampling.row_masses(many, values, temperature), drawn, temperature,
            torch.full((draws,), filters.get("top_k", sampling.EVERY_TOKEN), dtype=torch.int32),
            torch.full((draws,), filters.get("top_p", 1.0)), torch.full((draws,), filters.get("min_p", 0.0)),
            seeds, counters, False,
        )  # fmt: skip
        kept = range(300) if ids is None else ids.tolist()
        if filters and len(kept) >= 64:
            assert not covered.any()
            continue
        assert covered.all()
        checked += 1
        expected = torch.zeros(300, dtype=torch.float64)
        expected[list(kept)] = torch.from_numpy(weights / weights.sum()).double()
        frequencies = torch.bincount(tokens, minlength=300).double() / draws
        assert (frequencies[expected == 0] == 0).all()
        assert (frequencies - expected).abs().max() < 0.035, filters
    assert checked >= 4


def test_equals_at_the_edge_of_top_k_are_left_to_the_host() -> None:
    logits = torch.tensor([[3.0, 2.0, 2.0, 1.0, 0.0], [3.0, 2.5, 2.0, 1.0, 0.0]])
    values, indices = sampling.top_k_rows(logits, 4)
    ones, zeros = torch.ones(2), torch.zeros(2, dtype=torch.int32)
    masses = sampling.row_masses(logits, values, ones)
    two = torch.full((2,), 2, dtype=torch.int32)
    _, covered = sampling.sample_candidates(
        values, indices, masses, zeros, ones, two, ones, torch.zeros(2), zeros, zeros, False
    )
    assert covered.tolist() == [0, 1]


def test_draws_follow_the_probabilities_and_depend_on_seed_and_counter_alone() -> None:
    rows = 4000
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0]).expand(rows, 5).contiguous()
    counters, seeds = torch.arange(rows).int(), torch.full((rows,), 11, dtype=torch.int32)
    tokens, _ = sampling.draw_rows(logits, torch.full((rows,), 0.8), seeds, counters)
    later, _ = sampling.draw_rows(logits[17:], torch.full((rows - 17,), 0.8), seeds[17:], counters[17:])
    assert torch.equal(tokens[17:], later)
    frequencies = torch.bincount(tokens, minlength=5) / rows
    torch.testing.assert_close(frequencies, (logits[0] / 0.8).softmax(-1), atol=0.03, rtol=0)


def test_times_keep_their_digits_where_they_are_short() -> None:
    """P(noise > 12) is 1 - exp(-exp(-12)), 6e-6: the numbers near 0 make it, in steps far below their size."""
    u = torch.tensor([0.0, 1e-6, 0.5, 1.0 - 2**-24])
    expected = -torch.log1p(-(u.double() + 0.5 * 4.6566127342e-10))
    torch.testing.assert_close(sampling.waiting_time(u).double()[:3], expected[:3], atol=0, rtol=1e-5)
    assert torch.isfinite(sampling.waiting_time(u)).all()


def test_noise_is_gumbel_distributed_and_independent() -> None:
    """By quantiles over many counters, for the tokens of a group alone, for their largest, and for pairs."""
    count = 20_000
    counters, seeds = torch.arange(count).int()[:, None], torch.full((count, 1), 5, dtype=torch.int32)
    noise = sampling.token_noise(seeds, counters, torch.arange(60, 140).expand(count, -1)).double()
    probabilities = torch.exp(-torch.exp(-noise))  # uniform
    grid = torch.linspace(0.02, 0.98, 49).double()
    bound = 5 * (0.25 / count) ** 0.5
    for column in probabilities.T:
        assert ((column[:, None] <= grid).double().mean(0) - grid).abs().max() < bound
    inside = probabilities[:, 4:68]  # one group
    assert ((inside.max(1).values[:, None] ** 64 <= grid).double().mean(0) - grid).abs().max() < bound
    below = (probabilities < 0.5).double() - 0.5
    pairs = below.T @ below / count
    assert (pairs - torch.diag(torch.diag(pairs))).abs().max() < 1.3 / count**0.5


def test_random_words_are_philox() -> None:
    """Random123's known answer for a counter and a key of zeros."""
    zero = torch.zeros(1, dtype=torch.int32)
    words = [int(word) for word in sampling.random_words(zero, zero, zero)]
    assert words == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


@pytest.mark.gpu
def test_more_logits_than_32_bits_count() -> None:
    logits = torch.zeros(16400, 131072)
    logits[:, 131070] = 1.0
    logits[16399, 77] = 2.0
    check(argmax_rows, logits, device="cuda", tolerance=0.0)


@pytest.mark.parametrize(
    ("template", "arguments", "reason"),
    [
        (argmax_rows, (torch.empty(2, 9).half(),), "logits are torch.float16"),
        (top_k_rows, (torch.empty(2, 9), 10), "k is 10; the kernel finds 1 to 9 of 9"),
        (top_k_rows, (torch.empty(2, 300000), 128), "k = 128 of 300000 logits makes 18816 candidates"),
        (top_k_rows, (torch.empty(2, 9).double(), 3), "logits are torch.float64"),
    ],
)
def test_refusals(template: KernelTemplate, arguments: tuple[Any, ...], reason: str) -> None:
    refused = _refusal(template, *arguments)
    assert refused is not None and reason in refused.reason
    assert _refusal(template, torch.empty(2, 128256), *(64 for _ in arguments[1:])) is None


def test_candidates_past_what_a_program_holds_are_refused() -> None:
    refused = _refusal(sample_candidates, torch.empty(2, 2000), torch.empty(2, 2000).int())
    assert refused is not None and "2000 candidates" in refused.reason


def _refusal(template: KernelTemplate, *arguments: Any) -> Refusal | None:
    graph = fx.Graph()
    operands = []
    for index, argument in enumerate(arguments):
        operands.append(graph.placeholder(f"x{index}") if isinstance(argument, Tensor) else argument)
        if isinstance(argument, Tensor):
            operands[-1].meta["val"] = argument
    return template.supports(graph.call_function(template.op, tuple(operands)), H100)


def _logits(rows: int, vocabulary: int) -> Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(rows))
