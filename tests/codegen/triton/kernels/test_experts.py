"""Experts' kernels against their references: one product for all experts, sums, and how routers choose."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from llmc.codegen.triton.kernels.experts.choose_channels import mark_channels, take_channels, top_k
from llmc.codegen.triton.kernels.experts.expert_linear import expert_linear
from llmc.codegen.triton.kernels.experts.sum_experts import sum_experts
from llmc.formats.code_format import TOKEN_GROUP
from tests.codegen.triton.claimed import Claimed, rounded
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


# Format, group and channels of W, whether it has zeros, and what x is rounded to: with one scale per row, or one for
# each 32 channels. The last group may be shorter.
CODED_TOKENS = [
    ("int8", None, 192, False, "int8", None),
    ("int8", None, 100, False, "int8", TOKEN_GROUP),
    ("int8", 64, 192, False, "int8", TOKEN_GROUP),
    ("int4", 64, 192, True, "int8", TOKEN_GROUP),
    ("int4", 32, 192, False, "int8", None),
    ("int5", 64, 192, False, "int8", None),
    ("int6", None, 100, False, "int8", TOKEN_GROUP),
    ("q4_k", None, 576, False, "int8", TOKEN_GROUP),
    ("q6_k", None, 576, False, "int8", TOKEN_GROUP),
    ("iq4_xs", None, 576, False, "int8", None),
    ("fp8", None, 192, False, "fp8", None),
]


@pytest.mark.parametrize("each", [False, True], ids=["token", "slot"])
@pytest.mark.parametrize(
    ("format", "group", "channels", "asymmetric", "x_format", "x_group"),
    quick_sample(CODED_TOKENS, [CODED_TOKENS[i] for i in (0, 3, 8)]),
)
def test_tokens_in_codes(
    device: str,
    format: str,
    group: int | None,
    channels: int,
    asymmetric: bool,
    x_format: str,
    x_group: int | None,
    each: bool,
) -> None:
    """A row for each token, or for each slot of one: of a decode step, and more of an expert than a tile has."""
    weight = quantized_weight(format, EXPERTS * 40, channels, group, asymmetric=asymmetric)
    bias = seeded_normal(2, EXPERTS * 40).half()
    for tokens, dtype, given in ((1, torch.float32, None), (45, torch.float16, bias)):
        x = seeded_normal(tokens, *((tokens, 3) if each else (tokens,)), channels)
        x[..., channels // 2] *= 30
        arguments = (rounded(x.to(dtype), x_format, group=x_group), weight.claimed(), given, choose(tokens, 3), EXPERTS)
        check(expert_linear, *arguments, dtype, device=device, tolerance=GPU_KERNELS[dtype])


@pytest.mark.parametrize("x_group", [None, TOKEN_GROUP])
def test_codes_do_not_hide_a_nan(device: str, x_group: int | None) -> None:
    x, weight = seeded_normal(0, 6, 2, 70).half(), quantized_weight("int8", EXPERTS * 40, 70, None)
    x[1, 1, 69] = float("nan")
    arguments = (rounded(x, "int8", group=x_group), weight.claimed(), None, choose(6, 2), EXPERTS, x.dtype)
    check(expert_linear, *arguments, device=device, tolerance=GPU_KERNELS[x.dtype])


def test_a_static_scale(device: str) -> None:
    """A quarter of the range is cut off."""
    x, weight = seeded_normal(0, 6, 64).half(), quantized_weight("int8", EXPERTS * 40, 64, None)
    scale = torch.tensor([float(x.abs().max()) * 0.75 / 127])
    arguments = (rounded(x, "int8", scale), weight.claimed(), None, choose(6, 2), EXPERTS, torch.float16)
    check(expert_linear, *arguments, device=device, tolerance=GPU_KERNELS[torch.float16])


@pytest.mark.parametrize("format", quick_sample(["q4_k", "q6_k", "q3_k", "iq4_nl"], ["q6_k"]))
def test_blocked_codes(device: str, format: str) -> None:
    """With super-blocks of 288 columns."""
    weight = quantized_weight(format, EXPERTS * 24, 576, None)
    for tokens, dtype in ((1, torch.float32), (7, torch.float16)):
        arguments = (seeded_normal(0, tokens, 576).to(dtype), weight.claimed(), None, choose(tokens, 2), EXPERTS, None)
        check(expert_linear, *arguments, device=device, tolerance=GPU_KERNELS[dtype])


@pytest.mark.parametrize(("format", "x_group"), [(None, None), ("int8", None), ("int4", TOKEN_GROUP)])
def test_neighbours_change_no_bit(device: str, format: str | None, x_group: int | None) -> None:
    """A token's numbers alone are those among others."""
    tokens, out, channels = 40, 32, 64
    weight: Tensor | Claimed = seeded_normal(1, EXPERTS * out, channels).half()
    if format is not None:
        weight = quantized_weight(format, EXPERTS * out, channels, None).claimed()
    x, index = seeded_normal(0, tokens, channels).half(), choose(tokens, 2)

    def run(first: int, last: int) -> Tensor:
        given = x[first:last] if format is None else rounded(x[first:last], "int8", group=x_group)
        arguments = (given, weight, None, index[first:last], EXPERTS, x.dtype)
        call = TensorCall(expert_linear, arguments, (x.new_empty(last - first, 2, out),), device, in_place=False)
        (launch,) = call.candidates()
        for step in (launch, *launch.then):
            call.run(step)
        return call.results[0].cpu().clone()

    whole = run(0, tokens)
    for token in (0, 17, tokens - 1):
        assert torch.equal(run(token, token + 1)[0], whole[token])


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
