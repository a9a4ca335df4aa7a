"""llmc_rope_angles and llmc_rope against their references."""

from __future__ import annotations

import pytest
import torch

from llmc.ops.rope import rope, rope_angles
from llmc.targets import CpuTarget
from tests.codegen.cpp.kernel_calls import call, pointer, rows
from tests.codegen.cpp.runnable_targets import RUNNABLE
from tests.tolerances import ELEMENTS


@pytest.mark.parametrize("target", RUNNABLE)
@pytest.mark.parametrize("half", [1, 13, 32])
@pytest.mark.parametrize("scale", [1.0, 1.25])
def test_angles_are_right_up_to_a_million_positions(target: CpuTarget, half: int, scale: float) -> None:
    positions = torch.tensor([0, 1, 2, 1000, 4097, 131071, 999_999, *range(40)], dtype=torch.int32)
    inv_freq = 500_000.0 ** -(torch.arange(half) / half)
    cos, sin = (torch.empty(len(positions), half) for _ in range(2))
    given = {"positions": positions, "inv_freq": inv_freq, "cos": cos, "sin": sin}
    values = {"tokens": len(positions), "half": half, "scale": scale}
    call(target, "rope_angles", [], values | {name: pointer(tensor) for name, tensor in given.items()})
    expected_cos, expected_sin = rope_angles(positions, inv_freq, scale)
    torch.testing.assert_close(cos, expected_cos, rtol=0, atol=3e-7)
    torch.testing.assert_close(sin, expected_sin, rtol=0, atol=3e-7)


@pytest.mark.parametrize("target", RUNNABLE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(
    ("tokens", "heads", "head_dim", "half"),
    [(1, 1, 2, 1), (5, 3, 13, 4), (2, 4, 64, 32), (37, 9, 96, 24), (130, 8, 80, 40)],
)
def test_equals_the_reference(
    target: CpuTarget,
    dtype: torch.dtype,
    interleaved: bool,
    in_place: bool,
    tokens: int,
    heads: int,
    head_dim: int,
    half: int,
) -> None:
    generator = torch.Generator().manual_seed(head_dim)
    merged = torch.randn(tokens, heads * head_dim + 5, generator=generator).to(dtype)
    x = merged[:, 3:-2].unflatten(1, (heads, head_dim))
    angles = 100 * torch.rand(tokens, half, generator=generator)
    cos, sin = angles.cos(), angles.sin()
    expected = rope(x, cos, sin, interleaved)
    y = x if in_place else torch.empty(tokens, heads, head_dim, dtype=dtype)
    sizes = {"tokens": tokens, "heads": heads, "head_dim": head_dim, "half": half, "interleaved": interleaved}
    operands = {"x": rows(x), "cos": pointer(cos), "sin": pointer(sin), "y": rows(y)}
    call(target, "rope", [dtype], {**sizes, **operands})
    torch.testing.assert_close(y, expected, rtol=ELEMENTS[dtype], atol=ELEMENTS[dtype])
