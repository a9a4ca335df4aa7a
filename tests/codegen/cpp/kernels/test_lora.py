"""llmc_lora: each token's row at its own adapter's ranks, the same bits whatever stands beside it, others left."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from llmc.ops.lora import lora
from llmc.targets import CpuTarget
from tests.codegen.cpp.kernel_calls import call, pointer, rows
from tests.codegen.cpp.runnable_targets import RUNNABLE

SLOTS, MAX_RANK, CHANNELS, ENDS = 5, 9, 77, [33, 40, 97]


def _pools(dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ranks = torch.randint(0, MAX_RANK + 1, (SLOTS, len(ENDS)), generator=generator, dtype=torch.int32)
    ranks[0], ranks[1] = MAX_RANK, 0
    return {
        "lora_a": torch.randn(SLOTS, len(ENDS), MAX_RANK, CHANNELS, generator=generator).to(dtype),
        "lora_b": torch.randn(SLOTS, MAX_RANK, ENDS[-1], generator=generator).to(dtype),
        "ranks": ranks,
    }


def _computed(target: CpuTarget, x: Tensor, pools: dict[str, Tensor], adapters: Tensor | None) -> Tensor:
    tokens = len(x)
    y = torch.full((tokens, ENDS[-1] + 2), 7.0)[:, : ENDS[-1]]
    order = torch.zeros(2 * tokens, dtype=torch.int32)
    shrunk = torch.zeros(tokens, len(ENDS) * MAX_RANK)
    sizes = {"tokens": tokens, "channels": CHANNELS, "out": ENDS[-1], "slots": SLOTS, "max_rank": MAX_RANK}
    values: dict[str, Any] = sizes | {"parts": len(ENDS), "x": rows(x), "y": rows(y), "shrunk": rows(shrunk)}
    values |= {f"end{index}": end for index, end in enumerate([*ENDS, ENDS[-1]])}
    values |= {name: pointer(pool) for name, pool in pools.items()}
    values |= {"adapters": pointer(adapters), "order": pointer(order)}
    call(target, "lora", [x.dtype], values)
    return y


@pytest.mark.parametrize("target", RUNNABLE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 7, 67])
def test_equals_the_reference(target: CpuTarget, dtype: torch.dtype, tokens: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, CHANNELS + 1, generator=generator).to(dtype)[:, :CHANNELS]
    pools = _pools(dtype)
    adapters = torch.randint(0, SLOTS + 1, (tokens,), generator=generator, dtype=torch.int32)
    adapters[0] = 1
    y = _computed(target, x, pools, adapters)
    expected = lora(x, pools["lora_a"], pools["lora_b"], pools["ranks"], adapters, ENDS)
    has = adapters != 0
    torch.testing.assert_close(y[has], expected[has], atol=2e-4, rtol=1e-4)
    assert torch.equal(y[~has], torch.full_like(y[~has], 7.0))
    for token in range(0, tokens, 9):
        alone = _computed(target, x[token : token + 1], pools, adapters[token : token + 1].clone())
        assert torch.equal(alone[0], y[token])


@pytest.mark.parametrize("target", RUNNABLE)
def test_a_step_without_adapters_is_left_alone(target: CpuTarget) -> None:
    x = torch.randn(5, CHANNELS)
    for adapters in (None, torch.zeros(5, dtype=torch.int32)):
        y = _computed(target, x, _pools(torch.float32), adapters)
        assert torch.equal(y, torch.full_like(y, 7.0))
