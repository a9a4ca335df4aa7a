"""Choosing tokens on the device: the largest, the k largest, and a draw among them, as the references do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

from llmc.codegen.triton.kernel import KernelTemplate
from llmc.codegen.triton.kernels.argmax_rows import argmax_rows
from llmc.codegen.triton.kernels.sample_candidates import sample_candidates
from llmc.codegen.triton.kernels.top_k_rows import top_k_rows
from llmc.graph.refusal import Refusal
from llmc.ops import sampling
from llmc.targets import GpuTarget, resolve_target
from tests.codegen.triton.tensor_call import check

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


def test_samples_with_every_filter(device: str) -> None:
    rows = 64
    values, indices = sampling.top_k_rows(_logits(rows, 300) * 3, 50)
    generator = torch.Generator().manual_seed(3)
    temperature = torch.rand(rows, generator=generator) * 2
    temperature[::7] = 0.0
    top_k = torch.randint(1, 80, (rows,), generator=generator).int()
    top_p, min_p = torch.rand(rows, generator=generator), torch.rand(rows, generator=generator) * 0.1
    top_p[::3], min_p[::2] = 1.0, 0.0
    seeds = torch.randint(-(2**31), 2**31, (rows,), generator=generator).int()
    arguments = (values, indices, temperature, top_k, top_p, min_p, seeds, torch.arange(rows).int())
    check(sample_candidates, *arguments, device=device, tolerance=0.0)


def test_draws_follow_the_probabilities_and_depend_on_seed_and_counter_alone() -> None:
    rows = 4000
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0]).expand(rows, 5).contiguous()
    values, indices = sampling.top_k_rows(logits, 4)
    counters = torch.arange(rows).int()

    def draw(first: int) -> Tensor:
        part = slice(first, None)
        count = rows - first
        return sampling.sample_candidates(
            values[part],
            indices[part],
            torch.full((count,), 0.8),
            torch.full((count,), 4, dtype=torch.int32),
            torch.ones(count),
            torch.zeros(count),
            torch.full((count,), 11, dtype=torch.int32),
            counters[part],
        )

    tokens = draw(0)
    assert torch.equal(tokens[17:], draw(17))
    frequencies = torch.bincount(tokens, minlength=5) / rows
    expected = torch.cat([(values[0] / 0.8).softmax(-1), torch.zeros(1)])
    torch.testing.assert_close(frequencies, expected, atol=0.03, rtol=0)


def test_uniform_numbers_are_philox() -> None:
    """Random123's known answer for a counter and a key of zeros: its first word is 0x6627e8d5."""
    zero = torch.zeros(1, dtype=torch.int32)
    torch.testing.assert_close(sampling.uniform(zero, zero), torch.tensor([0x6627E8D5 * 4.6566127342e-10]))


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
    found = _refusal(template, *arguments)
    assert found is not None and reason in found.reason
    assert _refusal(template, torch.empty(2, 128256), *(64 for _ in arguments[1:])) is None


def test_candidates_past_what_a_program_holds_are_refused() -> None:
    found = _refusal(sample_candidates, torch.empty(2, 2000), torch.empty(2, 2000).int())
    assert found is not None and "2000 candidates" in found.reason


def _refusal(template: KernelTemplate, *arguments: Any) -> Refusal | None:
    target = resolve_target("h100")
    assert isinstance(target, GpuTarget)
    graph = fx.Graph()
    operands = []
    for index, argument in enumerate(arguments):
        operands.append(graph.placeholder(f"x{index}") if isinstance(argument, Tensor) else argument)
        if isinstance(argument, Tensor):
            operands[-1].meta["val"] = argument
    return template.supports(graph.call_function(template.op, tuple(operands)), target)


def _logits(rows: int, vocabulary: int) -> Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(rows))
