"""Kernels with states equal their ops' references, in bits whatever steps a sequence is cut into."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import llmc.ops  # noqa: F401  (registers torch.ops.llmc)
from llmc.targets import CpuTarget
from tests.codegen.cpp.kernel_calls import call, pointer, rows
from tests.codegen.cpp.runnable_targets import RUNNABLE
from tests.codegen.state_steps import check, numbers


def metadata(state: Tensor, step: list[Tensor]) -> dict[str, object]:
    names = ("query_starts", "context_lens", "state_slots")
    pointers = {name: pointer(tensor) for name, tensor in zip(names, step, strict=True)}
    return {"requests": len(step[2]), "state": pointer(state), **pointers}


@pytest.mark.parametrize("target", RUNNABLE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("channels", "width", "has_bias"), [(37, 4, True), (1, 2, False), (64, 3, True), (5, 1, True)])
def test_causal_conv(target: CpuTarget, dtype: torch.dtype, channels: int, width: int, has_bias: bool) -> None:
    x, weight = numbers(64, channels, dtype=dtype), numbers(width, channels, seed=1)
    bias = numbers(channels, seed=2) if has_bias else None

    def kernel(state: Tensor, step: list[Tensor], tokens: Tensor) -> Tensor:
        given, y = x[tokens], torch.empty(len(tokens), channels, dtype=dtype)
        values = {"channels": channels, "width": width, "x": rows(given), "y": rows(y), "weight": pointer(weight)}
        values |= metadata(state, step) | ({} if bias is None else {"bias": pointer(bias)})
        call(target, "causal_conv", [dtype], values)
        return y

    def reference(state: Tensor, step: list[Tensor], tokens: Tensor) -> Tensor:
        y: Tensor = torch.ops.llmc.causal_conv_with_state(x[tokens], weight, bias, state, *step)
        return y

    check(kernel, reference, (width - 1, channels), 2e-2 if dtype is torch.bfloat16 else 2e-5)


@pytest.mark.parametrize("target", RUNNABLE)
@pytest.mark.parametrize(("channels", "n"), [(13, 16), (1, 1), (3, 19), (33, 32)])
def test_selective_scan(target: CpuTarget, channels: int, n: int) -> None:
    x, dt = numbers(64, channels), numbers(64, channels, seed=1).abs()
    rates = -numbers(channels, n, seed=2).exp()
    b, c = numbers(64, n, seed=3), numbers(64, n, seed=4)

    def kernel(state: Tensor, step: list[Tensor], tokens: Tensor) -> Tensor:
        y = torch.empty(len(tokens), channels)
        given = {"x": x[tokens], "dt": dt[tokens], "B": b[tokens], "C": c[tokens], "y": y}
        values = {name: rows(tensor) for name, tensor in given.items()} | metadata(state, step)
        call(target, "selective_scan", [], {**values, "channels": channels, "n": n, "A": pointer(rates)})
        return y

    def reference(state: Tensor, step: list[Tensor], tokens: Tensor) -> Tensor:
        given = (x[tokens], dt[tokens], rates, b[tokens], c[tokens])
        y: Tensor = torch.ops.llmc.selective_scan_with_state(*given, state, *step)
        return y

    check(kernel, reference, (channels, n))


@pytest.mark.parametrize("target", RUNNABLE)
@pytest.mark.parametrize(("channels", "initial", "tropical"), [(37, 0.0, False), (1, -1e38, True), (64, 0.5, True)])
def test_linear_recurrence(target: CpuTarget, channels: int, initial: float, tropical: bool) -> None:
    x, decay = numbers(64, channels), -numbers(64, channels, seed=1).abs()

    def kernel(state: Tensor, step: list[Tensor], tokens: Tensor) -> Tensor:
        y = torch.empty(len(tokens), channels)
        given = {"x": x[tokens], "decay": decay[tokens], "y": y}
        values = {name: rows(tensor) for name, tensor in given.items()} | metadata(state, step)
        call(
            target,
            "linear_recurrence",
            [],
            {**values, "channels": channels, "initial": initial, "tropical": int(tropical)},
        )
        return y

    def reference(state: Tensor, step: list[Tensor], tokens: Tensor) -> Tensor:
        given = (x[tokens], decay[tokens], initial, tropical)
        y: Tensor = torch.ops.llmc.linear_recurrence_with_state(*given, state, *step)
        return y

    check(kernel, reference, (channels,))


@pytest.mark.parametrize("target", RUNNABLE)
@pytest.mark.parametrize("has_beta", [False, True])
@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 4, 16, 37), (3, 3, 5, 80)])
def test_linear_attention(target: CpuTarget, has_beta: bool, by_channel: bool, shape: tuple[int, ...]) -> None:
    groups, heads, key_dim, value_dim = shape
    q, k = numbers(64, groups, key_dim), numbers(64, groups, key_dim, seed=1) * key_dim**-0.5
    v = numbers(64, heads, value_dim, seed=2)
    decay = -numbers(64, heads, *((key_dim,) if by_channel else ()), seed=3).abs()
    beta = numbers(64, heads, seed=4).sigmoid() if has_beta else None

    def kernel(state: Tensor, step: list[Tensor], tokens: Tensor) -> Tensor:
        y = torch.empty(len(tokens), heads, value_dim)
        given = {"q": q, "k": k, "v": v, "decay": decay, **({} if beta is None else {"beta": beta})}
        held = [tensor[tokens].flatten(1) for tensor in given.values()]
        values = {name: rows(tensor) for name, tensor in zip(given, held, strict=True)}
        sizes = {"groups": groups, "heads": heads, "key_dim": key_dim, "value_dim": value_dim}
        decays = {"decays": key_dim if by_channel else 1, "y": rows(y.view(len(tokens), -1))}
        call(target, "linear_attention", [], {**values, **sizes, **decays, **metadata(state, step)})
        return y

    def reference(state: Tensor, step: list[Tensor], tokens: Tensor) -> Tensor:
        betas = None if beta is None else beta[tokens]
        given = (q[tokens], k[tokens], v[tokens], decay[tokens], betas)
        y: Tensor = torch.ops.llmc.linear_attention_with_state(*given, state, *step)
        return y

    check(kernel, reference, (heads, key_dim, value_dim))
