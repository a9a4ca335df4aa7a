"""Products with quantized weights against the ops' eager references, for every instruction set of this machine."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from llmc.formats.code_format import CODE_FORMATS, TOKEN_GROUP
from llmc.graph.code_numbers import code_numbers, in_steps, per_column
from llmc.ops.embedding import embedding
from llmc.ops.linear import fused_linear, gated_linear, linear, lm_head
from llmc.ops.token_codes import token_codes, token_values
from llmc.targets import CpuTarget
from tests.codegen.cpp.kernel_calls import kernels, open_pool
from tests.codegen.cpp.quantized_calls import (
    QuantizedWeight,
    call_quantized,
    call_quantized_embedding,
    operands,
    quantized,
)
from tests.codegen.cpp.runnable_targets import CODED

targets = pytest.mark.parametrize("target", CODED)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])

# What the schemes make: format, what x is rounded to, symmetric.
SCHEMES = [
    ("int8", "none", True),
    ("int8", "none", False),
    ("int4", "none", True),
    ("int4", "none", False),
    ("int5", "none", True),
    ("int5", "none", False),
    ("int6", "none", True),
    ("int6", "none", False),
    ("fp8", "none", True),
    ("nf4", "none", True),
    ("mxfp4", "none", True),
    ("int8", "int8", True),
    ("int8", "int8", False),
    ("int4", "int8", True),
    ("int4", "int8", False),
    ("int5", "int8", True),
    ("int5", "int8", False),
    ("int6", "int8", True),
    ("int6", "int8", False),
    ("fp8", "fp8", True),
]
schemes = pytest.mark.parametrize(("format", "x_format", "symmetric"), SCHEMES)

# tokens, out, in, group: ones, primes, the panel's and the tiles' edges, several parts of k, several blocks of tokens.
SHAPES = [
    (1, 1, 1, None),
    (3, 31, 7, None),
    (9, 33, 129, None),
    (7, 97, 1543, None),
    (2, 40, 96, 32),
    (17, 70, 640, 128),
    (5, 64, 1088, 64),
    (14, 64, 512, 128),
    (29, 32, 528, 16),
    (515, 35, 48, 16),
]


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype)


def assert_close(actual: Tensor, expected: Tensor, x: Tensor, weight: QuantizedWeight) -> None:
    """Equal but for the order of the sum over in, and one rounding of the element type."""
    bound = 6e-7 * (x.float().abs() @ weight.values().abs().t()).amax().item() + 1e-6
    relative = 0.0 if actual.dtype == torch.float32 else 2.0**-7
    torch.testing.assert_close(actual.float(), expected.float(), rtol=relative, atol=bound)


@targets
@dtypes
@schemes
def test_linear_matches_reference(
    target: CpuTarget, dtype: torch.dtype, format: str, x_format: str, symmetric: bool
) -> None:
    torch.manual_seed(0)
    for number, (tokens, out, channels, group) in enumerate(SHAPES):
        scale_dtype = (torch.float32, torch.float16, torch.bfloat16)[number % 3]
        weight = quantized(out, channels, format, group=group, symmetric=symmetric, scale_dtype=scale_dtype)
        x = draw(tokens, channels, dtype=dtype)
        y = call_quantized(target, "linear", x, weight, x.new_empty(tokens, out), x_format=x_format)
        assert_close(y, linear(*operands(x, weight, x_format), None, dtype), x, weight)


@targets
@pytest.mark.parametrize(("format", "x_format"), [("int8", "int8"), ("int4", "int8"), ("fp8", "fp8")])
def test_activations_can_have_a_static_scale(target: CpuTarget, format: str, x_format: str) -> None:
    """Too small for some values, which saturate."""
    torch.manual_seed(1)
    weight, x, x_scale = quantized(50, 128, format, group=64), draw(11, 128), torch.tensor([0.01])
    y = call_quantized(target, "linear", x, weight, torch.empty(11, 50), x_format=x_format, x_scale=x_scale)
    assert_close(y, linear(*operands(x, weight, x_format, x_scale)), x, weight)


@targets
@dtypes
@pytest.mark.parametrize("x_format", ["int8", "fp8"])
@pytest.mark.parametrize("is_static", [False, True])
def test_tokens_get_the_very_codes_and_scales_of_torch(
    target: CpuTarget, dtype: torch.dtype, x_format: str, is_static: bool
) -> None:
    """A weight of ones on the diagonal shows them. Half of the tokens are small integers, so that many of their
    channels lie in the middle between two codes."""
    torch.manual_seed(9)
    x = draw(700, 64)
    x[::2] = torch.randint(-254, 255, (350, 64)) / 2
    x *= torch.logspace(-3, 3, 700)[:, None]
    x, x_scale = x.to(dtype), torch.tensor([0.37]) if is_static else None
    ones = torch.eye(64, dtype=torch.int8)
    codes = ones if x_format == "int8" else ones.float().to(torch.float8_e4m3fn).view(torch.uint8)
    weight = QuantizedWeight(codes, torch.ones(64, 1), None, x_format)
    y = call_quantized(target, "lm_head", x, weight, torch.empty(700, 64), x_format=x_format, x_scale=x_scale)
    assert torch.equal(y, token_values(*token_codes(x, x_scale, x_format), x_format))


@targets
@pytest.mark.parametrize("x_format", ["int8", "fp8"])
def test_extreme_activations(target: CpuTarget, x_format: str) -> None:
    """Tokens of zeros, of one great value, of tiny and of huge ones."""
    torch.manual_seed(2)
    format = "int8" if x_format == "int8" else "fp8"
    weight, x = quantized(40, 64, format, group=32), draw(5, 64)
    x[0] = 0
    x[1] = 0
    x[1, 3] = -100
    x[2] *= 1e-30
    x[3] *= 1e30
    y = call_quantized(target, "linear", x, weight, torch.empty(5, 40), x_format=x_format)
    expected = linear(*operands(x, weight, x_format))
    assert (y[0] == 0).all()
    for t in range(1, 5):
        assert_close(y[t : t + 1] / x[t].abs().amax(), expected[t : t + 1] / x[t].abs().amax(), x[4:], weight)


@targets
@pytest.mark.parametrize(("format", "x_format"), [("int8", "int8"), ("int4", "int8"), ("fp8", "fp8")])
@pytest.mark.parametrize("x_scale", [None, torch.tensor([0.01])], ids=["dynamic", "static"])
def test_codes_do_not_hide_a_nan(target: CpuTarget, format: str, x_format: str, x_scale: torch.Tensor | None) -> None:
    """Wherever it lies in a token; the other tokens are none the worse."""
    weight, x = quantized(40, 70, format, group=None), torch.ones(9, 70)
    for token, channel in ((1, 0), (4, 37), (8, 69)):
        x[token, channel] = float("nan")
    y = call_quantized(target, "linear", x, weight, torch.empty(9, 40), x_format=x_format, x_scale=x_scale)
    assert y.isnan().all(1).tolist() == [token in (1, 4, 8) for token in range(9)]
    assert y.isfinite().all(1).tolist() == [token not in (1, 4, 8) for token in range(9)]


@targets
@dtypes
@pytest.mark.parametrize(
    ("format", "x_format"), [("int4", "none"), ("int6", "none"), ("int4", "int8"), ("int8", "int8")]
)
def test_linear_with_everything(target: CpuTarget, dtype: torch.dtype, format: str, x_format: str) -> None:
    """Bias, activation, scale and residual together; the rows of x, residual and y are slices of wider matrices."""
    torch.manual_seed(3)
    x, residual = draw(19, 80, dtype=dtype)[:, 5:69], draw(19, 90, dtype=dtype)[:, 3:80]
    weight, bias = quantized(77, 64, format, group=32, symmetric=False), draw(77, dtype=dtype)
    wide = torch.full((19, 100), 7.0, dtype=dtype)
    y = wide[:, 10:87]
    call_quantized(
        target,
        "linear",
        x,
        weight,
        y,
        x_format=x_format,
        bias=bias,
        residual=residual,
        activation="silu",
        scale=0.22,
        threads=3,
    )
    expected = fused_linear(*operands(x, weight, x_format), bias, residual, "silu", 0.22, dtype)
    relative = 2e-6 if dtype == torch.float32 else 2.0**-7
    torch.testing.assert_close(y, expected, rtol=relative, atol=relative)
    assert (wide[:, :10] == 7).all() and (wide[:, 87:] == 7).all()


@targets
@dtypes
@schemes
def test_gated_linear_matches_reference(
    target: CpuTarget, dtype: torch.dtype, format: str, x_format: str, symmetric: bool
) -> None:
    torch.manual_seed(4)
    relative = 2e-6 if dtype == torch.float32 else 2.0**-7
    for out in (1, 16, 53):
        x, bias = draw(10, 64, dtype=dtype), draw(2 * out, dtype=dtype)
        weight = quantized(2 * out, 64, format, group=32, symmetric=symmetric)
        y = call_quantized(
            target, "gated_linear", x, weight, x.new_empty(10, out), x_format=x_format, bias=bias, activation="silu"
        )
        expected = gated_linear(*operands(x, weight, x_format), bias, "silu", dtype)
        torch.testing.assert_close(y, expected, rtol=relative, atol=2 * relative)


@targets
@dtypes
@pytest.mark.parametrize(
    ("format", "x_format"), [("int8", "none"), ("int8", "int8"), ("int4", "int8"), ("int6", "none")]
)
def test_lm_head_returns_fp32(target: CpuTarget, dtype: torch.dtype, format: str, x_format: str) -> None:
    torch.manual_seed(5)
    x, weight, bias = draw(9, 70, dtype=dtype), quantized(1001, 70, format), draw(1001)
    y = call_quantized(target, "lm_head", x, weight, torch.empty(9, 1001), x_format=x_format, bias=bias)
    assert_close(y, lm_head(*operands(x, weight, x_format), bias), x, weight)


@targets
@dtypes
@pytest.mark.parametrize("x_format", ["none", "int8"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("format", ["int5", "int6"])
def test_codes_in_planes_multiply_as_bytes_do(
    target: CpuTarget, dtype: torch.dtype, x_format: str, symmetric: bool, format: str
) -> None:
    """Bit for bit what the same codes give in 8 bits, from which only the unpacking differs."""
    torch.manual_seed(10)
    for tokens, out, channels, group in SHAPES:
        weight = quantized(out, channels, format, group=group, symmetric=symmetric)
        x = draw(tokens, channels, dtype=dtype)
        in_planes, in_bytes = (
            call_quantized(target, "linear", x, stored, x.new_empty(tokens, out), x_format=x_format)
            for stored in (weight, replace(weight, format="int8"))
        )
        assert torch.equal(in_planes, in_bytes)


@targets
@dtypes
@pytest.mark.parametrize("format", CODE_FORMATS)
def test_embedding_is_exact(target: CpuTarget, dtype: torch.dtype, format: str) -> None:
    torch.manual_seed(6)
    ids = torch.tensor([0, 69, 31, 32, 5, 5, 40, 63, 64], dtype=torch.int32)
    for channels, group, symmetric in [
        (96, 32, True),
        (77, None, True),
        (640, 128, CODE_FORMATS[format].integers is None),
    ]:
        if CODE_FORMATS[format].is_blocked:
            channels, symmetric = 512, True
        weight = quantized(70, channels, format, group=group, symmetric=symmetric)
        y = call_quantized_embedding(target, ids, weight, torch.empty(9, channels, dtype=dtype))
        assert torch.equal(y, embedding(ids, weight.values(), dtype))


@targets
@dtypes
@pytest.mark.parametrize(
    ("format", "x_format", "group"),
    [
        ("int4", "none", 128),
        ("int8", "none", None),
        ("nf4", "none", 64),
        ("int4", "int8", 128),
        ("int8", "int8", None),
        ("int5", "none", None),
        ("int6", "int8", 64),
    ],
)
def test_a_row_does_not_depend_on_its_neighbours(
    target: CpuTarget, dtype: torch.dtype, format: str, x_format: str, group: int | None
) -> None:
    """Bit for bit the same alone, in any batch, in any place of it, and with any number of threads."""
    torch.manual_seed(7)
    x, weight = draw(600, 1152, dtype=dtype), quantized(70, 1152, format, group=group, symmetric=format == "nf4")

    def run(rows: Tensor, threads: int) -> Tensor:
        y = rows.new_empty(rows.shape[0], 70)
        return call_quantized(target, "linear", rows, weight, y, x_format=x_format, threads=threads)

    whole = run(x, 2)
    for first, count, threads in [(0, 1, 1), (599, 1, 2), (3, 8, 4), (100, 13, 1), (64, 32, 2), (88, 512, 3)]:
        assert torch.equal(run(x[first : first + count], threads), whole[first : first + count])


@targets
def test_what_an_earlier_product_left_in_the_scratch_does_not_matter(target: CpuTarget) -> None:
    torch.manual_seed(8)
    with open_pool(target, 2, kernels(target).llmc_linear_scratch(300, 704)) as pool:
        for tokens, channels, format, x_format in [
            (300, 704, "nf4", "none"),
            (3, 16, "int4", "int8"),
            (40, 64, "int6", "none"),
            (17, 704, "int8", "int8"),
            (1, 32, "fp8", "fp8"),
        ]:
            x, weight = draw(tokens, channels), quantized(64, channels, format, group=16)
            y = call_quantized(target, "linear", x, weight, torch.empty(tokens, 64), x_format=x_format, pool=pool)
            assert_close(y, linear(*operands(x, weight, x_format)), x, weight)


BLOCKED = [name for name, format in CODE_FORMATS.items() if format.is_blocked]
# tokens, out, channels: of whole blocks, and of other runs, within which parts of k end; several parts, tiles, blocks
# of tokens.
BLOCKED_SHAPES = [(1, 70, 512), (3, 33, 576), (9, 40, 768), (29, 35, 896), (2, 32, 640), (13, 33, 96), (515, 32, 256)]


@targets
@dtypes
@pytest.mark.parametrize("format", BLOCKED)
@pytest.mark.parametrize(("x_format", "x_group"), [("none", None), ("int8", None), ("int8", TOKEN_GROUP)])
def test_blocked_formats_match_reference(
    target: CpuTarget, dtype: torch.dtype, format: str, x_format: str, x_group: int | None
) -> None:
    torch.manual_seed(11)
    for tokens, out, channels in BLOCKED_SHAPES:
        weight, x = quantized(out, channels, format, scale_dtype=torch.float16), draw(tokens, channels, dtype=dtype)
        y = call_quantized(target, "linear", x, weight, x.new_empty(tokens, out), x_format=x_format, x_group=x_group)
        assert_close_blocked(y, linear(*operands(x, weight, x_format, None, x_group), None, dtype), x, weight)


def assert_close_blocked(actual: Tensor, expected: Tensor, x: Tensor, weight: QuantizedWeight) -> None:
    """Equal but for the order of sums, of products with codes and of those with minima, which may cancel each other."""
    parts = [weight.scales, weight.scale_steps, weight.minima, weight.minimum_steps]
    scales, steps, minima, minimum_steps = (None if part is None else part.abs() for part in parts)
    assert scales is not None
    codes = code_numbers(weight.codes, weight.format).abs()
    larger = codes * per_column(in_steps(scales, steps), codes.shape[1])
    if minima is not None:
        larger += per_column(in_steps(minima, minimum_steps), codes.shape[1])
    bound = 1e-6 * (x.float().abs() @ larger.t()).amax().item() + 1e-6
    relative = 0.0 if actual.dtype == torch.float32 else 2.0**-7
    torch.testing.assert_close(actual.float(), expected.float(), rtol=relative, atol=bound)


@targets
@dtypes
@pytest.mark.parametrize(("format", "group"), [("int8", None), ("int8", 16), ("int4", 128), ("int4", 32), ("int6", 64)])
@pytest.mark.parametrize("symmetric", [True, False])
def test_tokens_are_rounded_by_groups(
    target: CpuTarget, dtype: torch.dtype, format: str, group: int | None, symmetric: bool
) -> None:
    """Of 32 channels, one of which is large: also where the last ones are fewer."""
    torch.manual_seed(12)
    for tokens, channels in [(1, 640), (13, 1152), (3, 560), (515, 128)]:
        if group is not None and channels % group:
            continue
        weight = quantized(40, channels, format, group=group, symmetric=symmetric)
        x = draw(tokens, channels, dtype=dtype)
        x[:, 37] *= 10
        y = call_quantized(target, "linear", x, weight, x.new_empty(tokens, 40), x_format="int8", x_group=TOKEN_GROUP)
        assert_close(y, linear(*operands(x, weight, "int8", None, TOKEN_GROUP), None, dtype), x, weight)


@targets
@pytest.mark.parametrize("format", ["q4_k", "q6_k", "q2_k"])
@pytest.mark.parametrize("x_group", [None, TOKEN_GROUP])
def test_a_row_of_a_blocked_format_does_not_depend_on_its_neighbours(
    target: CpuTarget, format: str, x_group: int | None
) -> None:
    torch.manual_seed(13)
    x, weight = draw(600, 768, dtype=torch.bfloat16), quantized(70, 768, format, scale_dtype=torch.float16)
    for x_format in ("none", "int8") if x_group is None else ("int8",):

        def run(rows: Tensor, threads: int, x_format: str = x_format) -> Tensor:
            y = rows.new_empty(rows.shape[0], 70)
            return call_quantized(
                target, "linear", rows, weight, y, x_format=x_format, x_group=x_group, threads=threads
            )

        whole = run(x, 2)
        for first, count, threads in [(0, 1, 1), (599, 1, 2), (3, 8, 4), (100, 13, 1), (88, 512, 3)]:
            assert torch.equal(run(x[first : first + count], threads), whole[first : first + count])
