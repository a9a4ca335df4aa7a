"""The kernels' exp, tanh and erf, seen through the activations of a product with one input of weight one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from llmc.codegen.cpp.pack import pack
from llmc.ops.activation import ACTIVATIONS, apply_activation
from llmc.program import Layout
from llmc.targets import CpuTarget
from tests.codegen.cpp.linear_calls import call_linear
from tests.codegen.cpp.runnable_targets import RUNNABLE

targets = pytest.mark.parametrize("target", RUNNABLE)


def activate(target: CpuTarget, x: Tensor, activation: str) -> Tensor:
    packed = pack(torch.ones(1, 1), Layout.PANELS, torch.float32)
    y = torch.empty(len(x), 1)
    return call_linear(target, "linear", x[:, None].contiguous(), packed, y, activation=activation).squeeze(1)


@targets
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_are_as_exact_as_fp32_allows(target: CpuTarget, activation: str) -> None:
    """Against fp64. As in torch, GELU's 1 + erf cancels and quick GELU's exp takes a rounded product."""
    torch.manual_seed(0)
    x = torch.cat([torch.linspace(-30, 30, 60001), torch.randn(20000), torch.randn(2000) * 1e-3])
    expected = apply_activation(x.double(), activation)
    bound = 6e-7 * expected.abs()
    if activation in ("gelu", "gelu_tanh"):
        bound += 2e-7 * x.abs()
    if activation == "quick_gelu":
        bound += 1.2e-7 * x.abs() * expected.abs()
    assert ((activate(target, x, activation).double() - expected).abs() <= bound).all()


@targets
def test_limits_of_activations(target: CpuTarget) -> None:
    x = torch.tensor([-torch.inf, -1e4, -0.0, 0.0, 1e-30, 1e4, torch.inf, torch.nan])
    for activation in ("sigmoid", "tanh", "relu"):
        expected = apply_activation(x, activation)
        torch.testing.assert_close(activate(target, x, activation), expected, rtol=1e-6, atol=0, equal_nan=True)
    for activation in ("silu", "quick_gelu", "gelu_tanh", "gelu"):
        y = activate(target, x, activation)
        assert y[1:5].abs().max() < 1e-29 and y[5] == 1e4 and y[6] == torch.inf and y[7].isnan()
