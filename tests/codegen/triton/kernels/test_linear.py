"""The matrix products against their references: every kernel that serves a row count, every epilogue, odd shapes."""

from __future__ import annotations

import pytest
import torch

from llmc.codegen.triton.kernel import LibraryFunction
from llmc.codegen.triton.kernels.products.linear import fused_linear, gated_linear, linear, lm_head
from llmc.program.arrival_counters import ARRIVALS
from tests.codegen.triton.claimed import normed
from tests.codegen.triton.tensor_call import check
from tests.quick_sample import quick_sample
from tests.seeded_normal import seeded_normal
from tests.tolerances import GPU_KERNELS, NORMED_PRODUCTS

# Every count in one dtype, and each kernel once in the others.
ROWS = [
    *((torch.float16, tokens) for tokens in (1, 2, 3, 7, 33, 70, 131)),
    *((dtype, tokens) for dtype in (torch.float32, torch.bfloat16) for tokens in (1, 3, 33, 131)),
]


@pytest.mark.parametrize(("dtype", "tokens"), quick_sample(ROWS, ROWS[::2]))
def test_every_row_count(device: str, dtype: torch.dtype, tokens: int) -> None:
    x, weight = seeded_normal(0, tokens, 264).to(dtype), seeded_normal(1, 72, 264).to(dtype)
    check(linear, x, weight, seeded_normal(2, 72).to(dtype), device=device, tolerance=GPU_KERNELS[dtype])


@pytest.mark.parametrize("target", ["a100", "mi300x"])
@pytest.mark.parametrize("tokens", quick_sample([1, 20, 150], [20]))
def test_other_targets(device: str, tokens: int, target: str) -> None:
    if device == "cuda" and target == "mi300x":
        pytest.skip("its launches are not for this device")
    x, weight = seeded_normal(0, tokens, 256).half(), seeded_normal(1, 100, 256).half()
    check(linear, x, weight, None, device=device, tolerance=1e-3, target=target)


@pytest.mark.parametrize(
    ("outputs", "channels"), quick_sample([(1, 1), (13, 31), (257, 100), (64, 1024)], [(1, 1), (13, 31)])
)
@pytest.mark.parametrize("tokens", [1, 17, 66])
def test_odd_shapes(device: str, tokens: int, outputs: int, channels: int) -> None:
    x, weight = seeded_normal(0, tokens, channels).half(), seeded_normal(1, outputs, channels).half()
    check(linear, x, weight, None, device=device, tolerance=1e-3)


@pytest.mark.parametrize("tokens", quick_sample([1, 4, 9, 65, 131], [4, 65]))
def test_epilogue(device: str, tokens: int) -> None:
    x, weight, bias = seeded_normal(0, tokens, 64).half(), seeded_normal(1, 40, 64).half(), seeded_normal(2, 40).half()
    residual = seeded_normal(3, tokens, 40).half()
    check(fused_linear, x, weight, bias, residual, "gelu_tanh", 0.5, device=device, tolerance=1e-3)
    check(fused_linear, x, weight, None, residual, "identity", 1.0, device=device, tolerance=1e-3)
    check(fused_linear, x, weight, bias, None, "relu2", 1.0, device=device, tolerance=1e-3)


GATED = [
    *((torch.bfloat16, tokens) for tokens in (1, 3, 9, 65, 131)),
    *((dtype, tokens) for dtype in (torch.float32, torch.float16) for tokens in (1, 65)),
]


@pytest.mark.parametrize(("dtype", "tokens"), quick_sample(GATED, GATED[::3]))
def test_gated(device: str, dtype: torch.dtype, tokens: int) -> None:
    x, weight, bias = (seeded_normal(i, *s).to(dtype) for i, s in enumerate([(tokens, 48), (2 * 37, 48), (2 * 37,)]))
    check(gated_linear, x, weight, bias, "silu", device=device, tolerance=GPU_KERNELS[dtype])
    check(gated_linear, x, weight, None, "gelu", device=device, tolerance=GPU_KERNELS[dtype])


NORMED = [*((torch.bfloat16, tokens) for tokens in (1, 3, 9, 65, 131)), *((torch.float32, tokens) for tokens in (1, 9))]


@pytest.mark.parametrize(("dtype", "tokens"), quick_sample(NORMED, NORMED[1::3]))
def test_normed_rows(device: str, dtype: torch.dtype, tokens: int) -> None:
    """In the product's own kernel and in a launch before it, one of them the library's."""
    x, norm = 3 * seeded_normal(0, tokens, 72).to(dtype), 1 + seeded_normal(1, 72) / 4
    weight, gates, bias = (
        seeded_normal(2, 40, 72).to(dtype),
        seeded_normal(3, 2 * 37, 72).to(dtype),
        seeded_normal(4, 40).to(dtype),
    )
    tolerance = NORMED_PRODUCTS[dtype]
    for weights in (norm.to(dtype), None) if tokens == 9 else (norm.to(dtype),):
        launches = check(linear, normed(x, weights), weight, bias, device=device, tolerance=tolerance)
        ways = {launch.constants.get("NORMED", False) for launch in launches}
        # Tiles of many tokens do not norm what they read.
        assert ways == {True, False} or (tokens > 65 and ways == {False})
        assert any(isinstance(step.function, LibraryFunction) for launch in launches for step in launch.then)
    check(gated_linear, normed(x, norm.to(dtype)), gates, None, "silu", device=device, tolerance=tolerance)


@pytest.mark.parametrize("tokens", [1, 5, 70])
def test_logits_stay_in_fp32(device: str, tokens: int) -> None:
    x, weight = seeded_normal(0, tokens, 96).half(), seeded_normal(1, 130, 96).half()
    check(lm_head, x, weight, None, device=device, tolerance=2e-6)


def test_split_sums_are_the_same_in_every_run(device: str) -> None:
    x, weight = seeded_normal(0, 16, 2048).half(), seeded_normal(1, 64, 2048).half()
    launches = check(lm_head, x, weight, None, device=device, tolerance=1e-5)
    split = [launch for launch in launches if int(launch.constants.get("SPLITS") or 1) > 1]
    assert split and all(launch.arguments["arrivals_ptr"] == ARRIVALS for launch in split)
