"""llmc_select_rows copies the rows that are asked for, in order and as often as they are named."""

from __future__ import annotations

import pytest
import torch

from llmc.targets import CpuTarget
from tests.codegen.cpp.kernel_calls import call, pointer, rows
from tests.codegen.cpp.runnable_targets import RUNNABLE


@pytest.mark.parametrize("target", RUNNABLE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("selected", [[], [4], [2, 0, 0, 6], list(range(7)) * 50])
def test_equals_indexing(target: CpuTarget, dtype: torch.dtype, selected: list[int]) -> None:
    wide = torch.randn(7, 131, generator=torch.Generator().manual_seed(0)).to(dtype)
    x = wide[:, 1:128]
    index = torch.tensor(selected, dtype=torch.int32)
    y = torch.empty(len(selected), 127, dtype=dtype)
    values = {"selected": len(selected), "channels": 127, "rows": pointer(index), "x": rows(x), "y": rows(y)}
    call(target, "select_rows", [dtype], values)
    assert torch.equal(y, x[index.long()])
