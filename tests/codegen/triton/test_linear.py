"""The matrix products against their references: every kernel that serves a row count, every epilogue, odd shapes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from llmc.codegen.triton.kernel import LibraryFunction
from llmc.codegen.triton.kernels.linear import fused_linear, gated_linear, linear, lm_head
from tests.codegen.triton.claimed import normed
from tests.codegen.triton.tensor_call import check

TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
# Every count in one dtype, and each kernel once in the others.
ROWS = [
    *((torch.float16, tokens) for tokens in (1, 2, 3, 7, 33, 70, 131)),
    *((dtype, tokens) for dtype in (torch.float32, torch.bfloat16) for tokens in (1, 3, 33, 131)),
]


def _random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("dtype", "tokens"), ROWS)
def test_every_row_count(device: str, dtype: torch.dtype, tokens: int) -> None:
    x, weight = _random(0, tokens, 264).to(dtype), _random(1, 72, 264).to(dtype)
    check(linear, x, weight, _random(2, 72).to(dtype), device=device, tolerance=TOLERANCE[dtype])


@pytest.mark.parametrize("target", ["a100", "mi300x"])
@pytest.mark.parametrize("tokens", [1, 20, 150])
def test_other_targets(device: str, tokens: int, target: str) -> None:
    if device == "cuda" and target == "mi300x":
        pytest.skip("its launches are not for this device")
    x, weight = _random(0, tokens, 256).half(), _random(1, 100, 256).half()
    check(linear, x, weight, None, device=device, tolerance=1e-3, target=target)


@pytest.mark.parametrize(("outputs", "channels"), [(1, 1), (13, 31), (257, 100), (64, 1024)])
@pytest.mark.parametrize("tokens", [1, 17, 66])
def test_odd_shapes(device: str, tokens: int, outputs: int, channels: int) -> None:
    x, weight = _random(0, tokens, channels).half(), _random(1, outputs, channels).half()
    check(linear, x, weight, None, device=device, tolerance=1e-3)


@pytest.mark.parametrize("tokens", [1, 4, 9, 65, 131])
def test_epilogue(device: str, tokens: int) -> None:
    x, weight, bias = _random(0, tokens, 64).half(), _random(1, 40, 64).half(), _random(2, 40).half()
    residual = _random(3, tokens, 40).half()
    check(fused_linear, x, weight, bias, residual, "gelu_tanh", 0.5, device=device, tolerance=1e-3)
    check(fused_linear, x, weight, None, residual, "identity", 1.0, device=device, tolerance=1e-3)
    check(fused_linear, x, weight, bias, None, "relu2", 1.0, device=device, tolerance=1e-3)


@pytest.mark.parametrize(
    ("dtype", "tokens"),
    [
        *((torch.bfloat16, tokens) for tokens in (1, 3, 9, 65, 131)),
        *((dtype, tokens) for dtype in (torch.float32, torch.float16) for tokens in (1, 65)),
    ],
)
def test_gated(device: str, dtype: torch.dtype, tokens: int) -> None:
    x, weight, bias = (_random(i, *s).to(dtype) for i, s in enumerate([(tokens, 48), (2 * 37, 48), (2 * 37,)]))
    check(gated_linear, x, weight, bias, "silu", device=device, tolerance=TOLERANCE[dtype])
    check(gated_linear, x, weight, None, "gelu", device=device, tolerance=TOLERANCE[dtype])


NORM_TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.5e-2}


@pytest.mark.parametrize(
    ("dtype", "tokens"),
    [*((torch.bfloat16, tokens) for tokens in (1, 3, 9, 65, 131)), *((torch.float32, tokens) for tokens in (1, 9))],
)
def test_normed_rows(device: str, dtype: torch.dtype, tokens: int) -> None:
    """In the product's own kernel and in a launch before it, one of them the library's."""
    x, norm = 3 * _random(0, tokens, 72).to(dtype), 1 + _random(1, 72) / 4
    weight, gates, bias = _random(2, 40, 72).to(dtype), _random(3, 2 * 37, 72).to(dtype), _random(4, 40).to(dtype)
    tolerance = NORM_TOLERANCE[dtype]
    for weights in (norm.to(dtype), None) if tokens == 9 else (norm.to(dtype),):
        launches = check(linear, normed(x, weights), weight, bias, device=device, tolerance=tolerance)
        ways = {launch.constants.get("NORMED", False) for launch in launches}
        # Tiles of many tokens do not norm what they read.
        assert ways == {True, False} or (tokens > 65 and ways == {False})
        assert any(isinstance(step.function, LibraryFunction) for launch in launches for step in launch.then)
    check(gated_linear, normed(x, norm.to(dtype)), gates, None, "silu", device=device, tolerance=tolerance)


@pytest.mark.parametrize("tokens", [1, 5, 70])
def test_logits_stay_in_fp32(device: str, tokens: int) -> None:
    x, weight = _random(0, tokens, 96).half(), _random(1, 130, 96).half()
    check(lm_head, x, weight, None, device=device, tolerance=2e-6)


def test_split_sums_are_the_same_in_every_run(device: str) -> None:
    x, weight = _random(0, 16, 2048).half(), _random(1, 64, 2048).half()
    launches = check(lm_head, x, weight, None, device=device, tolerance=1e-5)
    split = [launch for launch in launches if int(launch.constants.get("SPLITS") or 1) > 1]
    assert split and all(launch.then for launch in split)
