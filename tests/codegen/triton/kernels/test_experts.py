"""Experts' kernels against their references: one product for all experts, sums, and how routers choose."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from llmc.codegen.triton.kernels.experts.choose_channels import mark_channels, take_channels, top_k
from llmc.codegen.triton.kernels.experts.expert_linear import expert_linear
from llmc.codegen.triton.kernels.experts.sum_experts import sum_experts
from tests.codegen.triton.quantized_weight import quantized_weight
from tests.codegen.triton.tensor_call import TensorCall, check
from tests.quick_sample import quick_sample
from tests.seeded_normal import seeded_normal
from tests.tolerances import GPU_KERNELS

EXPERTS = 5
SCHEMES = [("int4", 32, False), ("mxfp4", 32, False), ("int8", None, False), ("int4", 64, True), ("fp8", None, False)]


def choose(tokens: int, slots: int) -> Tensor:
    """Different experts for each token; of the last one a slot that is none. No token is sent to the last expert."""
    generator = torch.Generator().manual_seed(tokens)
    index = torch.stack([torch.randperm(EXPERTS - 1, generator=generator)[:slots] for _ in range(tokens)]).int()
    index[-1, -1] = EXPERTS
    return index


@pytest.mark.parametrize("dtype", list(GPU_KERNELS))
@pytest.mark.parametrize(
    ("tokens", "slots", "each", "out", "channels"),
    quick_sample(
        [(1, 2, False, 64, 64), (45, 3, False, 37, 72), (9, 2, True, 96, 100)],
        [(45, 3, False, 37, 72), (9, 2, True, 96, 100)],
    ),
)
def test_dense(device: str, dtype: torch.dtype, tokens: int, slots: int, each: bool, out: int, channels: int) -> None:
    x = seeded_normal(0, tokens, slots, channels) if each else seeded_normal(0, tokens, channels)
    weight, bias = seeded_normal(1, EXPERTS * out, channels) / channels**0.5, seeded_normal(2, EXPERTS * out)
    for given in (None, bias.to(dtype)):
        arguments = (x.to(dtype), weight.to(dtype), given, choose(tokens, slots), EXPERTS, None)
        check(expert_linear, *arguments, device=device, tolerance=GPU_KERNELS[dtype])


@pytest.mark.parametrize(("format", "group", "asymmetric"), quick_sample(SCHEMES, SCHEMES[:3]))
def test_codes(device: str, format: str, group: int | None, asymmetric: bool) -> None:
    weight = quantized_weight(format, EXPERTS * 48, 192, group, asymmetric=asymmetric)
    for tokens, dtype in ((1, torch.float32), (7, torch.float16)):
        arguments = (seeded_normal(0, tokens, 192).to(dtype), weight.claimed(), None, choose(tokens, 2), EXPERTS, None)
        check(expert_linear, *arguments, device=device, tolerance=GPU_KERNELS[dtype])


@pytest.mark.parametrize("format", quick_sample(["q4_k", "q6_k", "q3_k", "iq4_nl"], ["q6_k"]))
def test_blocked_codes(device: str, format: str) -> None:
    """With super-blocks of 288 columns."""
    weight = quantized_weight(format, EXPERTS * 24, 576, None)
    for tokens, dtype in ((1, torch.float32), (7, torch.float16)):
        arguments = (seeded_normal(0, tokens, 576).to(dtype), weight.claimed(), None, choose(tokens, 2), EXPERTS, None)
        check(expert_linear, *arguments, device=device, tolerance=GPU_KERNELS[dtype])


def test_neighbours_change_no_bit(device: str) -> None:
    """A token's numbers alone are those among others."""
    tokens, weight = 40, seeded_normal(1, EXPERTS * 32, 64).half()
    x, index = seeded_normal(0, tokens, 64).half(), choose(tokens, 2)
    whole = _run(device, x, weight, index)
    for token in (0, 17, tokens - 1):
        alone = _run(device, x[token : token + 1], weight, index[token : token + 1])
        assert torch.equal(alone[0], whole[token])


def _run(device: str, x: Tensor, weight: Tensor, index: Tensor) -> Tensor:
    arguments = (x, weight, None, index, EXPERTS, None)
    call = TensorCall(expert_linear, arguments, (x.new_empty(*index.shape, 32),), device, in_place=False)
    (launch,) = call.candidates()
    for step in (launch, *launch.then):
        call.run(step)
    return call.results[0].cpu().clone()


@pytest.mark.parametrize("dtype", list(GPU_KERNELS))
def test_sums(device: str, dtype: torch.dtype) -> None:
    x = seeded_normal(0, 7, 3, 37).to(dtype)
    for weights in (seeded_normal(1, 7, 3), seeded_normal(1, 7, 3).to(dtype)):
        check(sum_experts, x, weights, device=device, tolerance=GPU_KERNELS[dtype])


@pytest.mark.parametrize(("shape", "count"), [((6, 1), 1), ((6, 128), 8), ((6, 4, 8), 2), ((3, 200), 64)])
def test_the_largest_channels(device: str, shape: tuple[int, ...], count: int) -> None:
    """Of equals the lower channel, and of negative ones only, too; channels of masked groups are −inf."""
    x = (seeded_normal(0, *shape) * 4).round() - 20
    x[0, ..., : shape[-1] // 2] = float("-inf")
    check(top_k, x, count, device=device, tolerance=0.0)


def test_channels_are_taken_and_marked(device: str) -> None:
    x, index = seeded_normal(0, 5, 9), torch.randint(0, 9, (5, 3), generator=torch.Generator().manual_seed(1)).int()
    check(take_channels, x, index, device=device, tolerance=0.0)
    check(mark_channels, index, 9, device=device, tolerance=0.0)
