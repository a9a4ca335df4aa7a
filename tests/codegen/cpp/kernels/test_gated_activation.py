"""llmc_gated_activation against its reference, for every activation."""

from __future__ import annotations

import pytest
import torch

from llmc.ops.activation import ACTIVATIONS
from llmc.ops.gated_activation import gated_activation
from llmc.targets import CpuTarget
from tests.codegen.cpp.kernel_calls import call, rows
from tests.codegen.cpp.runnable_targets import RUNNABLE
from tests.tolerances import ELEMENTS


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
    values = {"tokens": tokens, "channels": channels, "gate": rows(gate), "up": rows(up), "y": rows(y)}
    call(target, "gated_activation", [dtype], values | {"activation": activation})
    expected = gated_activation(gate, up, activation)
    torch.testing.assert_close(y, expected, rtol=ELEMENTS[dtype], atol=2 * ELEMENTS[dtype])
