"""Kernels with states equal their ops' references, in bits whatever steps a sequence is cut into."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from llmc.codegen.triton.kernel import KernelTemplate
from llmc.codegen.triton.kernels.states.causal_conv import causal_conv
from llmc.codegen.triton.kernels.states.linear_attention import linear_attention
from llmc.codegen.triton.kernels.states.linear_recurrence import linear_recurrence
from llmc.codegen.triton.kernels.states.selective_scan import selective_scan
from tests.codegen.state_steps import check, numbers
from tests.codegen.triton.tensor_call import TensorCall
from tests.quick_sample import quick_sample

# Of tokens: the op's arguments without those of a state.
Given = Callable[[Tensor], tuple[Any, ...]]


def check_kernel(
    template: KernelTemplate, given: Given, like: int, shape: tuple[int, ...], device: str, tolerance: float = 2e-5
) -> None:
    """like: which argument the result is as large as. shape: of a state."""

    def kernel(state: Tensor, step: list[Tensor], tokens: Tensor) -> Tensor:
        arguments = given(tokens)
        call = TensorCall(template, (*arguments, state, *step), (arguments[like],), device, in_place=False)
        (launch,) = call.candidates()
        call.run(launch)
        state.copy_(call.memory["state", "state"])
        return call.results[0].cpu()

    def reference(state: Tensor, step: list[Tensor], tokens: Tensor) -> Tensor:
        y: Tensor = template.op(*given(tokens), state, *step)
        return y

    check(kernel, reference, shape, tolerance)


CONVOLUTIONS = [(37, 4, True), (1, 2, False), (64, 3, True), (5, 1, True), (70, 4, False)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("channels", "width", "has_bias"), quick_sample(CONVOLUTIONS, CONVOLUTIONS[:1]))
def test_causal_conv(device: str, dtype: torch.dtype, channels: int, width: int, has_bias: bool) -> None:
    x, weight = numbers(64, channels, dtype=dtype), numbers(width, channels, seed=1)
    bias = numbers(channels, seed=2) if has_bias else None
    tolerance = 2e-3 if dtype is torch.float16 else 2e-5
    check_kernel(causal_conv, lambda at: (x[at], weight, bias), 0, (width - 1, channels), device, tolerance)


SCANS = [(13, 16), (1, 1), (3, 19), (33, 32)]


@pytest.mark.parametrize(("channels", "n"), quick_sample(SCANS, {(3, 19)}))
def test_selective_scan(device: str, channels: int, n: int) -> None:
    x, dt = numbers(64, channels), numbers(64, channels, seed=1).abs()
    rates, b, c = -numbers(channels, n, seed=2).exp(), numbers(64, n, seed=3), numbers(64, n, seed=4)
    check_kernel(selective_scan, lambda at: (x[at], dt[at], rates, b[at], c[at]), 0, (channels, n), device)


@pytest.mark.parametrize(("channels", "initial", "tropical"), [(37, 0.0, False), (1, -1e38, True), (70, 0.5, True)])
def test_linear_recurrence(device: str, channels: int, initial: float, tropical: bool) -> None:
    x, decay = numbers(64, channels), -numbers(64, channels, seed=1).abs()
    check_kernel(linear_recurrence, lambda at: (x[at], decay[at], initial, tropical), 0, (channels,), device)


HEADS = [(1, 1, 1, 1), (2, 4, 16, 37), (3, 3, 5, 16), (1, 2, 256, 9)]


@pytest.mark.parametrize("has_beta", [False, True])
@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize(("groups", "heads", "key_dim", "value_dim"), quick_sample(HEADS, {(2, 4, 16, 37)}))
def test_linear_attention(
    device: str, has_beta: bool, by_channel: bool, groups: int, heads: int, key_dim: int, value_dim: int
) -> None:
    q, k = numbers(64, groups, key_dim), numbers(64, groups, key_dim, seed=1) * key_dim**-0.5
    v = numbers(64, heads, value_dim, seed=2)
    decay = -numbers(64, heads, *((key_dim,) if by_channel else ()), seed=3).abs()
    beta = numbers(64, heads, seed=4).sigmoid() if has_beta else None

    def given(at: Tensor) -> tuple[Any, ...]:
        return q[at], k[at], v[at], decay[at], None if beta is None else beta[at]

    check_kernel(linear_attention, given, 2, (heads, key_dim, value_dim), device)
