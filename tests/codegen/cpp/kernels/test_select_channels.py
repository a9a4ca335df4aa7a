"""llmc_select_channels against llmc::select_channels, from and to rows that are wider than they need be."""

from __future__ import annotations

import pytest
import torch

from llmc.ops.select_channels import select_channels
from llmc.targets import CpuTarget
from tests.codegen.cpp.kernel_calls import call, pointer, rows
from tests.codegen.cpp.runnable_targets import RUNNABLE


@pytest.mark.parametrize("target", RUNNABLE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 3, 200])
def test_equals_the_reference(target: CpuTarget, dtype: torch.dtype, tokens: int) -> None:
    torch.manual_seed(tokens)
    x, order = torch.randn(tokens, 80).to(dtype)[:, 3:70], torch.randperm(67)[:53].int()
    wide = torch.full((tokens, 60), 7.0).to(dtype)
    y = wide[:, 2:55]
    values = {"tokens": tokens, "channels": 53, "order": pointer(order), "x": rows(x), "y": rows(y)}
    call(target, "select_channels", [dtype], values)
    assert torch.equal(y, select_channels(x, order))
    assert (wide[:, :2] == 7).all() and (wide[:, 55:] == 7).all()
