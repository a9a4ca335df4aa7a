"""Products with experts' weights: each token's are bit for bit those of its experts' own products."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from llmc.codegen.cpp.pack import pack
from llmc.ops.expert_linear import expert_linear, sum_experts
from llmc.ops.top_k import MOST_CHANNELS, mark_channels, take_channels, top_k
from llmc.program import Layout
from llmc.targets import CpuTarget
from tests.codegen.cpp.kernel_calls import call, kernels, pointer, rows
from tests.codegen.cpp.linear_calls import call_linear
from tests.codegen.cpp.quantized_calls import QuantizedWeight, call_quantized, quantized
from tests.codegen.cpp.runnable_targets import CODED, RUNNABLE

EXPERTS, OUT, CHANNELS = 5, 64, 72
DTYPES = [torch.float32, torch.bfloat16]


def choose(tokens: int, slots: int) -> Tensor:
    """Different experts for each token; of the last token one that is none."""
    index = torch.stack([torch.randperm(EXPERTS - 1)[:slots] for _ in range(tokens)]).int()
    index[-1, -1] = EXPERTS
    return index


def call_experts(
    target: CpuTarget, family: str, x: Tensor, index: Tensor, bias: Tensor | None, fields: dict[str, Any]
) -> Tensor:
    """[tokens, slots, OUT]. x: [tokens, in], or [tokens, slots, in]."""
    tokens, slots = index.shape
    wide = torch.full((tokens, slots * OUT + 5), 7.0, dtype=x.dtype)
    pairs = torch.empty(tokens * slots, dtype=torch.int32)
    values = {
        "tokens": tokens,
        "in": x.shape[-1],
        "out": OUT,
        "x": rows(x),
        "bias": pointer(bias),
        "y": rows(wide[:, : slots * OUT]),
        "activation": "identity",
        "scale": 1.0,
        "index": pointer(index),
        "pairs": pointer(pairs),
        "slots": slots,
        "x_slots": slots if x.dim() == 3 else 1,
        "experts": EXPERTS,
        **fields,
    }
    scratch = kernels(target).llmc_linear_scratch(tokens * slots, x.shape[-1])
    call(target, family, [x.dtype], values, scratch=scratch)
    assert (wide[:, slots * OUT :] == 7.0).all()
    return wide[:, : slots * OUT].reshape(tokens, slots, OUT)


def check(y: Tensor, x: Tensor, index: Tensor, product: Any) -> None:
    """product(expert, rows): the expert's own product, without others."""
    for token, slot in torch.cartesian_prod(*map(torch.arange, index.shape)).tolist():
        row = x[token, slot] if x.dim() == 3 else x[token]
        expert = int(index[token, slot])
        expected = torch.zeros(OUT, dtype=x.dtype) if expert == EXPERTS else product(expert, row[None])[0]
        assert torch.equal(y[token, slot], expected)


@pytest.mark.parametrize("target", RUNNABLE)
@pytest.mark.parametrize("dtype", DTYPES, ids=["f32", "bf16"])
@pytest.mark.parametrize(("tokens", "slots", "each"), [(1, 2, False), (23, 3, False), (9, 2, True)])
def test_dense_experts(target: CpuTarget, dtype: torch.dtype, tokens: int, slots: int, each: bool) -> None:
    torch.manual_seed(tokens)
    x = torch.randn((tokens, slots, CHANNELS) if each else (tokens, CHANNELS)).to(dtype)
    weight, bias, index = (
        torch.randn(EXPERTS * OUT, CHANNELS).to(dtype),
        torch.randn(EXPERTS * OUT),
        choose(tokens, slots),
    )
    packed = pack(weight, Layout.PANELS, dtype)
    y = call_experts(target, "expert_linear", x, index, bias, {"weight": pointer(packed)})
    reference = expert_linear(x, weight, bias, index, EXPERTS)
    torch.testing.assert_close(y.float(), reference.float(), rtol=2.0**-7 if dtype == torch.bfloat16 else 0, atol=3e-5)

    def product(expert: int, row: Tensor) -> Tensor:
        own = slice(expert * OUT, (expert + 1) * OUT)
        panels = pack(weight[own].contiguous(), Layout.PANELS, dtype)
        return call_linear(target, "linear", row.contiguous(), panels, row.new_empty(1, OUT), bias=bias[own])

    check(y, x, index, product)


@pytest.mark.parametrize("target", CODED)
@pytest.mark.parametrize(
    ("format", "x_format"), [("int4", "none"), ("int8", "int8"), ("int5", "none"), ("mxfp4", "none")]
)
def test_quantized_experts(target: CpuTarget, format: str, x_format: str) -> None:
    torch.manual_seed(3)
    weight = quantized(EXPERTS * OUT, 64, format, group=None if x_format == "int8" else 32)
    x, index = torch.randn(11, 64).bfloat16(), choose(11, 2)
    packed = weight.packed()
    fields = {"weight": pointer(packed), "group": weight.group, "x_format": x_format, **weight.fields()}
    y = call_experts(target, "quantized_expert_linear", x, index, None, fields)

    def product(expert: int, row: Tensor) -> Tensor:
        own = slice(expert * OUT, (expert + 1) * OUT)
        part = QuantizedWeight(weight.codes[own], weight.scales[own], None, format)
        return call_quantized(target, "linear", row.contiguous(), part, row.new_empty(1, OUT), x_format=x_format)

    check(y, x, index, product)


@pytest.mark.parametrize("target", CODED)
@pytest.mark.parametrize(("format", "x_format"), [("int4", "int8"), ("int4", "none")])
@pytest.mark.parametrize(
    "sent", [[1, 0, 1, 1, 1], [2, 0, 1, 0, 0], [3, 40, 700, 11, 0], [300, 300, 12, 13, 900]], ids=str
)
def test_experts_with_few_and_with_many_tokens(target: CpuTarget, format: str, x_format: str, sent: list[int]) -> None:
    """One token's experts, that of two slots of it, and more pairs than are packed together: sent[e] go to expert e."""
    torch.manual_seed(len(sent))
    weight = quantized(EXPERTS * OUT, 64, format, group=32)
    index = torch.repeat_interleave(torch.arange(EXPERTS), torch.tensor(sent)).int()
    is_one = sum(sent) < 10
    index = index[None] if is_one else index[torch.randperm(len(index))][:, None].contiguous()
    x = torch.randn(index.shape[0], 64).bfloat16()
    packed = weight.packed()
    fields = {"weight": pointer(packed), "group": weight.group, "x_format": x_format, **weight.fields()}
    y = call_experts(target, "quantized_expert_linear", x, index, None, fields)
    for expert in range(EXPERTS):
        own = slice(expert * OUT, (expert + 1) * OUT)
        part = QuantizedWeight(weight.codes[own], weight.scales[own], None, format)
        tokens, slots = (index == expert).nonzero(as_tuple=True)
        if len(tokens):
            alone = call_quantized(target, "linear", x[tokens], part, x.new_empty(len(tokens), OUT), x_format=x_format)
            assert torch.equal(y[tokens, slots], alone)


@pytest.mark.parametrize("target", RUNNABLE)
@pytest.mark.parametrize(("dtype", "weights"), [(a, b) for a in DTYPES for b in DTYPES], ids=str)
def test_sums_of_experts(target: CpuTarget, dtype: torch.dtype, weights: torch.dtype) -> None:
    torch.manual_seed(4)
    x, counts = torch.randn(7, 3, 37).to(dtype), torch.rand(7, 3).to(weights)
    y = x.new_empty(7, 37)
    values = {"tokens": 7, "slots": 3, "channels": 37, "x": rows(x), "weights": rows(counts), "y": rows(y)}
    call(target, "sum_experts", [dtype, weights], values)
    torch.testing.assert_close(y, sum_experts(x, counts), rtol=2.0**-7 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)


@pytest.mark.parametrize("target", RUNNABLE)
@pytest.mark.parametrize(("groups", "channels", "count"), [(1, 1, 1), (1, 128, 8), (4, 8, 2), (1, 200, MOST_CHANNELS)])
def test_the_largest_channels(target: CpuTarget, groups: int, channels: int, count: int) -> None:
    """Of equals the lower channel, and of negative ones only, too."""
    torch.manual_seed(channels)
    x = (torch.randn(6, groups, channels) * 4).round() - 20
    values, index = x.new_empty(6, groups, count), torch.empty(6, groups, count, dtype=torch.int32)
    fields = {"tokens": 6, "groups": groups, "channels": channels, "count": count}
    call(target, "top_k", [torch.float32], fields | {"x": rows(x), "values": rows(values), "index": rows(index)})
    expected_values, expected_index = top_k(x, count)
    assert torch.equal(values, expected_values) and torch.equal(index, expected_index.int())


@pytest.mark.parametrize("target", RUNNABLE[:1])
def test_channels_are_taken_and_marked(target: CpuTarget) -> None:
    x, index = torch.randn(5, 9), torch.randint(0, 9, (5, 3)).int()
    y, marks = torch.empty(5, 3), torch.empty(5, 9)
    fields = {"tokens": 5, "channels": 9, "index": rows(index)}
    call(target, "take_channels", [torch.float32], fields | {"taken": 3, "x": rows(x), "y": rows(y)})
    call(target, "mark_channels", [], fields | {"marked": 3, "y": rows(marks)})
    assert torch.equal(y, take_channels(x, index)) and torch.equal(marks.bool(), mark_channels(index, 9))
