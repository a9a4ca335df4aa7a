"""llmc_gated_activation against its reference, for every activation."""

from __future__ import annotations

import pytest
import torch

from llmc.ops.activation import ACTIVATIONS, gated_activation
from llmc.targets import CpuTarget
from tests.codegen.cpp.row_abi import ACTIVATION_NUMBER, TOLERANCE, GatedActivation, call, rows
from tests.codegen.cpp.runnable_targets import RUNNABLE


@pytest.mark.parametrize("target", RUNNABLE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize("shape", [(1, 1), (3, 37), (33, 300)])
def test_equals_the_reference(target: CpuTarget, dtype: torch.dtype, activation: str, shape: tuple[int, int]) -> None:
    tokens, channels = shape
    generator = torch.Generator().manual_seed(tokens)
    merged = (3 * torch.randn(tokens, 2 * channels, generator=generator)).to(dtype)
    gate, up = merged[:, :channels], merged[:, channels:]
    y = torch.empty(tokens, channels, dtype=dtype)
    arguments = GatedActivation(tokens, channels, rows(gate), rows(up), rows(y), ACTIVATION_NUMBER[activation])
    call(target, "gated_activation", [dtype], arguments)
    expected = gated_activation(gate, up, activation)
    torch.testing.assert_close(y, expected, rtol=TOLERANCE[dtype], atol=2 * TOLERANCE[dtype])
