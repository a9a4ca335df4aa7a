"""The matrix products against the ops' eager references, for every instruction set that this machine runs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from llmc.codegen.cpp.pack import pack
from llmc.ops.activation import ACTIVATIONS
from llmc.ops.head_linear import head_linear
from llmc.ops.linear import fused_linear, gated_linear, linear, lm_head
from llmc.program import Layout
from llmc.targets import CpuTarget
from tests.codegen.cpp.kernel_calls import call, kernels, open_pool, pointer, rows
from tests.codegen.cpp.linear_calls import call_linear
from tests.codegen.cpp.runnable_targets import RUNNABLE

targets = pytest.mark.parametrize("target", RUNNABLE)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])

# tokens, in, out: ones, primes, the panel's and the tiles' edges, several blocks of k, several blocks of tokens.
SHAPES = [
    (1, 1, 1),
    (1, 2, 32),
    (2, 7, 31),
    (7, 33, 33),
    (14, 64, 64),
    (15, 65, 97),
    (37, 131, 61),
    (5, 1543, 40),
    (130, 96, 288),
    (1031, 24, 35),
]


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype)


def assert_close(actual: Tensor, expected: Tensor, x: Tensor, weight: Tensor) -> None:
    """Equal but for the order of the sum over in, and one rounding of the element type."""
    terms = x.float().abs() @ weight.float().abs().t()
    bound = 4e-7 * terms.amax().item() + 1e-6
    relative = 0.0 if actual.dtype == torch.float32 else 2.0**-7
    torch.testing.assert_close(actual.float(), expected.float(), rtol=relative, atol=bound)


@targets
@dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linear_matches_reference(target: CpuTarget, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    tokens, channels, out = shape
    x, weight = draw(tokens, channels, dtype=dtype), draw(out, channels, dtype=dtype)
    y = call_linear(target, "linear", x, pack(weight, Layout.PANELS, dtype), x.new_empty(tokens, out))
    assert_close(y, linear(x, weight), x, weight)


@targets
@dtypes
def test_lm_head_returns_fp32(target: CpuTarget, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    x, weight, bias = draw(9, 70, dtype=dtype), draw(1001, 70, dtype=dtype), draw(1001)
    packed = pack(weight, Layout.PANELS, dtype)
    plain = call_linear(target, "lm_head", x, packed, torch.empty(9, 1001))
    biased = call_linear(target, "lm_head", x, packed, torch.empty(9, 1001), bias=bias)
    assert_close(plain, lm_head(x, weight), x, weight)
    assert_close(biased, lm_head(x, weight, bias), x, weight)


@targets
@dtypes
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_fused_linear_matches_reference(target: CpuTarget, dtype: torch.dtype, activation: str) -> None:
    """Bias, activation, scale and residual together; the rows of x, residual and y are slices of wider matrices."""
    torch.manual_seed(2)
    x, residual = draw(19, 80, dtype=dtype)[:, 5:42], draw(19, 90, dtype=dtype)[:, 3:80]
    weight, bias = draw(77, 37, dtype=dtype) / 6, draw(77, dtype=dtype)
    wide = torch.full((19, 100), 7.0, dtype=dtype)
    y = wide[:, 10:87]
    packed = pack(weight, Layout.PANELS, dtype)
    call_linear(
        target, "linear", x, packed, y, bias=bias, residual=residual, activation=activation, scale=0.22, threads=3
    )
    expected = fused_linear(x, weight, bias, residual, activation, 0.22)
    relative = 2e-6 if dtype == torch.float32 else 2.0**-7
    torch.testing.assert_close(y, expected, rtol=relative, atol=relative)
    assert (wide[:, :10] == 7).all() and (wide[:, 87:] == 7).all()


@targets
@dtypes
@pytest.mark.parametrize("out", [1, 16, 17, 53, 96])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_linear_matches_reference(target: CpuTarget, dtype: torch.dtype, out: int, activation: str) -> None:
    torch.manual_seed(3)
    x, weight, bias = draw(21, 45, dtype=dtype), draw(2 * out, 45, dtype=dtype) / 6, draw(2 * out, dtype=dtype)
    packed = pack(weight, Layout.GATED_PANELS, dtype)
    relative = 2e-6 if dtype == torch.float32 else 2.0**-7
    for given in (None, bias):
        y = x.new_empty(21, out)
        call_linear(target, "gated_linear", x, packed, y, bias=given, activation=activation)
        torch.testing.assert_close(y, gated_linear(x, weight, given, activation), rtol=relative, atol=relative)


@targets
@dtypes
@pytest.mark.parametrize("kernel", ["linear", "gated_linear"])
def test_a_row_does_not_depend_on_its_neighbours(target: CpuTarget, dtype: torch.dtype, kernel: str) -> None:
    """Bit for bit the same alone, in any batch, in any place of it, and with any number of threads."""
    torch.manual_seed(4)
    channels, out = 1100, 70
    x, weight, bias = draw(600, channels, dtype=dtype), draw(2 * out, channels, dtype=dtype), draw(2 * out)
    layout = Layout.PANELS if kernel == "linear" else Layout.GATED_PANELS
    columns = 2 * out if kernel == "linear" else out
    packed = pack(weight, layout, dtype)

    def run(rows: Tensor, threads: int) -> Tensor:
        y = rows.new_empty(rows.shape[0], columns)
        return call_linear(target, kernel, rows, packed, y, bias=bias, activation="silu", threads=threads)

    whole = run(x, 2)
    for first, count, threads in [(0, 1, 1), (599, 1, 2), (3, 8, 4), (100, 13, 1), (64, 32, 2), (88, 512, 3)]:
        assert torch.equal(run(x[first : first + count], threads), whole[first : first + count])


@targets
@dtypes
def test_what_an_earlier_product_left_in_the_scratch_does_not_matter(target: CpuTarget, dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    with open_pool(target, 2, kernels(target).llmc_linear_scratch(300, 701)) as pool:
        for tokens, channels in [(300, 700), (3, 9), (17, 701), (1, 33)]:
            x, weight = draw(tokens, channels, dtype=dtype), draw(64, channels, dtype=dtype)
            y = x.new_empty(tokens, 64)
            call_linear(target, "linear", x, pack(weight, Layout.PANELS, dtype), y, pool=pool)
            assert_close(y, linear(x, weight), x, weight)


@targets
@dtypes
@pytest.mark.parametrize(("tokens", "heads", "out", "channels"), [(1, 1, 1, 1), (3, 5, 16, 70), (131, 2, 97, 515)])
def test_each_head_has_a_product_of_its_own(
    target: CpuTarget, dtype: torch.dtype, tokens: int, heads: int, out: int, channels: int
) -> None:
    x, weight = draw(tokens, heads, channels, dtype=dtype), draw(heads, out, channels, dtype=dtype)
    wide = torch.full((tokens, heads * out + 3), 7.0).to(dtype)
    packed = pack(weight, Layout.PANELS, dtype)
    sizes = {"tokens": tokens, "in": channels, "out": out, "experts": heads}
    values = {**sizes, "x": rows(x), "weight": pointer(packed), "y": rows(wide)}
    call(target, "head_linear", [dtype], values, scratch=kernels(target).llmc_linear_scratch(tokens, channels))
    assert (wide[:, heads * out :] == 7.0).all()
    actual, expected = wide[:, : heads * out].unflatten(1, (heads, out)), head_linear(x, weight)
    for head in range(heads):
        assert_close(actual[:, head], expected[:, head], x[:, head], weight[head])
