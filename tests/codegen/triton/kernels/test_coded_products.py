"""Products with quantized weights against their references: every scheme, every kernel that serves a row count."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from llmc.codegen.triton.backend import python_function
from llmc.codegen.triton.code_rows import blocked_rows, code_rows, row_bytes
from llmc.codegen.triton.kernel import DeviceLaunch
from llmc.codegen.triton.kernels.products.linear import fused_linear, gated_linear, linear, lm_head
from llmc.codegen.triton.kernels.rows.embedding import embedding
from llmc.codegen.triton.kernels.rows.select_channels import select_channels
from llmc.formats.code_format import CODE_FORMATS, STEP_PARTS, TOKEN_GROUP
from llmc.graph.code_numbers import code_dtype
from llmc.graph.serialize import WeightOf
from llmc.ops.token_codes import token_codes
from llmc.program import Layout, WeightSlot, code_rows_layout, step_row_bytes
from llmc.runtime.executors.stored_weights import blocked_in_rows
from tests.blocked_parts import BLOCKED, blocked_parts
from tests.codegen.triton.claimed import normed, rounded, values_of
from tests.codegen.triton.quantized_weight import QuantizedWeight, quantized_weight
from tests.codegen.triton.tensor_call import TensorCall, check, relative_error
from tests.gpu_target import gpu_target
from tests.quick_sample import quick_sample
from tests.seeded_normal import seeded_normal
from tests.tolerances import FP8_SUMS, GPU_KERNELS, NORMED_CODES

H100 = gpu_target("h100")
# A norm summed in another order moves a value over the edge between two codes here and there.
# Format, columns that share a scale, whether it has zeros, what x is rounded to.
SCHEMES = [
    ("int4", 128, False, "none"),
    ("int4", 64, True, "none"),
    ("int4", 32, True, "none"),
    ("int4", None, False, "none"),
    ("int5", 128, False, "none"),
    ("int5", 32, True, "none"),
    ("int6", 64, True, "none"),
    ("int6", None, False, "none"),
    ("int8", None, False, "none"),
    ("int8", 128, True, "none"),
    ("fp8", None, False, "none"),
    ("fp8", 128, False, "none"),
    ("nf4", 64, False, "none"),
    ("mxfp4", 32, False, "none"),
    ("int8", None, False, "int8"),
    ("int8", 128, False, "int8"),
    ("int4", 128, True, "int8"),
    ("int4", 32, False, "int8"),
    ("int5", 128, False, "int8"),
    ("int6", 128, True, "int8"),
    ("fp8", None, False, "fp8"),
    ("fp8", 128, False, "fp8"),
]
# The tables of these are rounded to the type of the matrix units' operands.
ROUNDED = {"nf4"}


def _linear(
    x: Tensor,
    weight: QuantizedWeight,
    x_format: str,
    device: str,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    x_scale: Tensor | None = None,
    x_group: int | None = None,
    activation: str = "identity",
    scale: float = 1.0,
    target: str = "h100",
) -> list[DeviceLaunch]:
    tolerance = GPU_KERNELS[x.dtype] * (2 if weight.format in ROUNDED else 1)
    if device == "cuda" and x_format == "fp8":
        tolerance = max(tolerance, FP8_SUMS)
    arguments = (rounded(x, x_format, x_scale, x_group), weight.claimed(), bias, residual, activation, scale, x.dtype)
    return check(fused_linear, *arguments, device=device, tolerance=tolerance, target=target)


@pytest.mark.parametrize(("format", "group", "asymmetric", "x_format"), quick_sample(SCHEMES, SCHEMES[::2]))
def test_every_scheme(device: str, format: str, group: int | None, asymmetric: bool, x_format: str) -> None:
    weight = quantized_weight(format, 24, 256, group, asymmetric=asymmetric)
    for tokens, dtype in ((1, torch.float32), (3, torch.bfloat16), (18, torch.float16)):
        _linear(seeded_normal(tokens, tokens, 256).to(dtype), weight, x_format, device)


@pytest.mark.parametrize("tokens", quick_sample([2, 70, 150], [2, 70]))
@pytest.mark.parametrize(("format", "group", "x_format"), [("int4", 128, "none"), ("int8", None, "int8")])
def test_every_row_count(device: str, tokens: int, format: str, group: int | None, x_format: str) -> None:
    _linear(seeded_normal(0, tokens, 384).half(), quantized_weight(format, 136, 384, group), x_format, device)


# Rows of 2 super-blocks of 256 or 288 columns, and of 1 whose steps end within a byte; outputs that fill no tile.
_EACH_ROUNDING = (("none", None), ("int8", None), ("int8", TOKEN_GROUP))
_OF_BLOCKS = [(f, c, *x) for f in BLOCKED for c in (512, 576, 608) for x in _EACH_ROUNDING]


@pytest.mark.parametrize(
    ("format", "channels", "x_format", "x_group"),
    quick_sample(_OF_BLOCKS, [("q4_k", 576, "none", None), ("iq4_xs", 608, "int8", TOKEN_GROUP)]),
)
def test_blocked_formats(device: str, format: str, channels: int, x_format: str, x_group: int | None) -> None:
    weight = quantized_weight(format, 13, channels, None)
    for tokens, dtype in ((1, torch.float32), (3, torch.bfloat16), (18, torch.float16)):
        x = seeded_normal(tokens, tokens, channels).to(dtype)
        _linear(x, weight, x_format, device, x_group=x_group)


def outlying(tokens: int, channels: int, dtype: torch.dtype) -> Tensor:
    """Tokens with a channel larger than all others, where groups of channels have different scales."""
    x = seeded_normal(tokens, tokens, channels)
    x[:, channels // 2] *= 30
    return x.to(dtype)


# Widths of SmolLM2, of Gemma 3 and of Qwen 2.5, and of a row whose last group of channels is short.
BY_GROUPS = [
    *(("int8", g, False, c) for c, g in ((576, None), (640, 64), (896, 128), (100, None))),
    *(("int4", g, z, c) for c, g, z in ((576, 64, True), (640, 128, False), (896, 32, True), (100, None, False))),
    *(("int5", g, z, c) for c, g, z in ((576, 32, False), (640, None, True), (896, 128, True))),
    *(("int6", g, z, c) for c, g, z in ((576, None, False), (640, 64, True), (896, 128, False))),
]


@pytest.mark.parametrize(
    ("format", "group", "asymmetric", "channels"), quick_sample(BY_GROUPS, [BY_GROUPS[0], BY_GROUPS[4], BY_GROUPS[7]])
)
def test_a_scale_of_x_for_each_group(
    device: str, format: str, group: int | None, asymmetric: bool, channels: int
) -> None:
    weight = quantized_weight(format, 24, channels, group, asymmetric=asymmetric)
    for tokens, dtype in ((1, torch.float32), (3, torch.bfloat16), (18, torch.float16)):
        _linear(outlying(tokens, channels, dtype), weight, "int8", device, x_group=TOKEN_GROUP)


@pytest.mark.parametrize("tokens", quick_sample([2, 70, 150], [70]))
@pytest.mark.parametrize(("format", "group"), [("int4", 128), ("int8", None)])
def test_every_row_count_of_groups(device: str, tokens: int, format: str, group: int | None) -> None:
    """Tiles of 16 to 128 tokens, whose scales are padded to sixteen."""
    weight, x = quantized_weight(format, 136, 384, group), outlying(tokens, 384, torch.float16)
    _linear(x, weight, "int8", device, x_group=TOKEN_GROUP)


def test_codes_and_scales_of_groups(device: str) -> None:
    """The same as in torch; tiles find more of the last token's scales after its own."""
    x = outlying(18, 100, torch.float16)
    x[3, 32:64], x[4, 99] = 0.0, float("nan")
    arguments = (rounded(x, "int8", group=TOKEN_GROUP), quantized_weight("int8", 8, 100, None).claimed())
    call = TensorCall(linear, arguments, (torch.empty(18, 8, dtype=torch.float16),), device, in_place=False)
    call.run(next(candidate for candidate in call.candidates() if candidate.constants["SCALES"] != 1))
    codes, scales = token_codes(x, None, "int8", TOKEN_GROUP)
    x_codes = call.memory["buffer", "workspace_x_codes"][:, :100].cpu()
    assert torch.equal(x_codes[scales.isfinite().all(1)], codes[scales.isfinite().all(1)])
    stored = call.memory["buffer", "workspace_x_scales"].view(-1)[: 4 * 32].view(4, 32).T.cpu()
    assert torch.equal(stored[:18].nan_to_num(nan=-1.0), scales.nan_to_num(nan=-1.0))
    assert torch.equal(stored[18:], scales[17:].expand(14, 4))


def test_a_single_group_has_a_minimum(device: str) -> None:
    weight = quantized_weight("q4_1", 5, 32, None)
    for tokens in (1, 5):
        _linear(seeded_normal(tokens, tokens, 32).half(), weight, "none", device)


# As of NVFP4: the two codes of a byte have scales and zeros of their own.
@pytest.mark.parametrize(("format", "asymmetric"), [("mxfp4", False), ("int4", True), ("int5", False)])
def test_groups_of_sixteen(device: str, format: str, asymmetric: bool) -> None:
    weight = quantized_weight(format, 13, 144, 16, asymmetric=asymmetric)
    for tokens, dtype in ((1, torch.float32), (3, torch.bfloat16), (18, torch.float16)):
        _linear(seeded_normal(tokens, tokens, 144).to(dtype), weight, "none", device)


@pytest.mark.parametrize("format", quick_sample(["q2_k", "q5_k", "q6_k"], ["q6_k"]))
@pytest.mark.parametrize("tokens", [1, 20])
def test_gates_of_blocked_formats(device: str, format: str, tokens: int) -> None:
    weight, x = quantized_weight(format, 2 * 37, 256, None), seeded_normal(0, tokens, 256).half()
    check(gated_linear, x, weight.claimed(), None, "silu", x.dtype, device=device, tolerance=1e-3)


CODES = [("int4", "none"), ("int5", "none"), ("int6", "int8"), ("int8", "none"), ("int8", "int8"), ("fp8", "fp8")]
ODD = [(*shape, *codes) for shape in ((1, 1), (13, 31), (130, 100), (20, 1032)) for codes in CODES]


@pytest.mark.parametrize(
    ("outputs", "channels", "format", "x_format"),
    quick_sample(
        ODD, [shape for shape in ODD if shape[:2] == (13, 31)] + [(20, 1032, *CODES[0]), (20, 1032, *CODES[4])]
    ),
)
def test_odd_shapes(device: str, outputs: int, channels: int, format: str, x_format: str) -> None:
    for tokens in (1, 17):
        x = seeded_normal(tokens, tokens, channels).half()
        _linear(x, quantized_weight(format, outputs, channels, None), x_format, device)


@pytest.mark.parametrize("tokens", quick_sample([1, 4, 9, 70], [4, 70]))
def test_epilogue(device: str, tokens: int) -> None:
    weight, x, residual = (
        quantized_weight("int4", 40, 64, 32),
        seeded_normal(0, tokens, 64).half(),
        seeded_normal(3, tokens, 40),
    )
    bias = seeded_normal(2, 40).half()
    _linear(x, weight, "none", device, bias=bias, residual=residual.half(), activation="gelu_tanh", scale=0.5)
    _linear(x, weight, "int8", device, bias=bias, activation="relu2")


@pytest.mark.parametrize("tokens", quick_sample([1, 3, 9, 70], [3, 70]))
@pytest.mark.parametrize(
    ("format", "group", "x_format", "x_group"),
    [
        ("int4", 32, "none", None),
        ("int6", 32, "none", None),
        ("int8", None, "int8", None),
        ("int4", 32, "int8", TOKEN_GROUP),
    ],
)
def test_gated(device: str, tokens: int, format: str, group: int | None, x_format: str, x_group: int | None) -> None:
    weight, x = quantized_weight(format, 2 * 37, 96, group), seeded_normal(0, tokens, 96).half()
    arguments = (
        rounded(x, x_format, group=x_group),
        weight.claimed(),
        seeded_normal(2, 2 * 37).half(),
        "silu",
        x.dtype,
    )
    check(gated_linear, *arguments, device=device, tolerance=1e-3)


@pytest.mark.parametrize("x_format", ["none", "int8"])
def test_logits_stay_in_fp32(device: str, x_format: str) -> None:
    weight = quantized_weight("int8", 130, 96, None)
    for tokens in (1, 5, 70):
        x = seeded_normal(0, tokens, 96).half()
        check(lm_head, rounded(x, x_format), weight.claimed(), device=device, tolerance=2e-6)


@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_a_static_scale_and_rows_of_zeros(device: str, format: str) -> None:
    x = seeded_normal(0, 6, 64).half()
    x[2] = 0
    weight = quantized_weight(format, 40, 64, None)
    # A quarter of the range is cut off.
    _linear(x, weight, format, device, x_scale=torch.tensor([float(x.abs().max()) * 0.75 / 127]))
    _linear(x, weight, format, device)


@pytest.mark.parametrize("format", ["int8", "fp8"])
@pytest.mark.parametrize("x_scale", [None, torch.tensor([0.1])], ids=["dynamic", "static"])
def test_codes_do_not_hide_a_nan(device: str, format: str, x_scale: Tensor | None) -> None:
    x = seeded_normal(0, 6, 70).half()
    x[1, 0], x[4, 69] = float("nan"), float("nan")
    _linear(x, quantized_weight(format, 40, 70, None), format, device, x_scale=x_scale)


@pytest.mark.parametrize("tokens", [3, 6])
def test_codes_of_groups_do_not_hide_a_nan(device: str, tokens: int) -> None:
    x = seeded_normal(0, tokens, 70).half()
    x[1, 69] = float("nan")
    _linear(x, quantized_weight("int8", 40, 70, None), "int8", device, x_group=TOKEN_GROUP)


@pytest.mark.parametrize(
    ("format", "x_group", "tokens", "dtype"),
    [("int8", None, 1, torch.float32), ("fp8", None, 6, torch.float16), ("int8", TOKEN_GROUP, 6, torch.float16)],
)
def test_rows_are_normed_where_they_are_rounded(
    device: str, format: str, x_group: int | None, tokens: int, dtype: torch.dtype
) -> None:
    """Which takes one launch, not two."""
    norm, tolerance = (1 + seeded_normal(1, 96) / 4).to(dtype), NORMED_CODES[dtype]
    x, residual = 3 * seeded_normal(0, tokens, 96).to(dtype), seeded_normal(2, tokens, 40).to(dtype)
    weight, gates = quantized_weight(format, 40, 96, None), quantized_weight(format, 2 * 37, 96, None)
    arguments = (rounded(normed(x, norm), format, group=x_group), weight.claimed(), None, residual, "silu", 1.0, dtype)
    launches = check(fused_linear, *arguments, device=device, tolerance=tolerance)
    assert {python_function(launch.function).__name__ for launch in launches} == {"quantize_tokens_kernel"}
    assert all(python_function(launch.then[0].function).__name__.startswith("code_") for launch in launches)
    gated = (rounded(normed(x, None), format, group=x_group), gates.claimed(), None, "silu", dtype)
    check(gated_linear, *gated, device=device, tolerance=tolerance)


def test_long_rows_are_normed_in_blocks(device: str) -> None:
    """Two blocks, the second of a few columns."""
    x, norm = 3 * seeded_normal(0, 1, 4100), 1 + seeded_normal(1, 4100) / 4
    weight = quantized_weight("int8", 1, 4100, None)
    arguments = (rounded(normed(x, norm), "int8"), weight.claimed())
    call = TensorCall(linear, arguments, (x[:, :1],), device, in_place=False)
    launch = call.candidates()[0]
    call.run(launch)
    codes, scales = token_codes(torch.ops.llmc.rms_norm(x, norm, 1e-5), None, "int8")
    assert (call.memory["buffer", "workspace_x_codes"][:, :4100].cpu() - codes).abs().max() <= 1
    assert torch.allclose(call.memory["buffer", "workspace_x_scales"].cpu(), scales, rtol=1e-6)


# Rows of W that fill no tile; channels that the warps of a block divide evenly or not; groups of more than a turn.
NARROW = [
    *(("int4", group, channels, zeros) for group, channels, zeros in ((128, 640, True), (256, 512, False))),
    *(("int8", group, channels, zeros) for group, channels, zeros in ((None, 640, False), (128, 512, True))),
    *(("fp8", group, channels, False) for group, channels in ((None, 512), (128, 384))),
    ("int4", None, 384, True),
    # Several groups in a turn.
    *(("int4", group, channels, zeros) for group, channels, zeros in ((32, 640, False), (32, 512, True))),
    *(("int4", 64, 512, False), ("int4", 64, 384, True), ("int8", 32, 512, False), ("int8", 64, 384, True)),
    *(("q4_k", None, 512, False), ("q4_1", None, 640, False), ("q6_k", None, 512, False), ("q5_k", None, 256, False)),
    # Blocks of 256 channels that warps divide evenly, and rows without such blocks.
    *(("q4_k", None, 1024, False), ("q4_k", None, 384, False), ("q6_k", None, 640, False)),
    *(("int6", 128, 512, True), ("int5", 16, 640, False), ("int5", None, 384, False), ("int6", 64, 256, True)),
]


@pytest.mark.parametrize(("format", "group", "channels", "has_zeros"), NARROW)
@pytest.mark.parametrize("tokens", quick_sample([1, 3, 8, 11, 16], [1, 11]))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_few_tokens_of_whole_turns(
    device: str, tokens: int, dtype: torch.dtype, format: str, group: int | None, channels: int, has_zeros: bool
) -> None:
    weight = quantized_weight(format, 70, channels, group, asymmetric=has_zeros)
    x, bias = (seeded_normal(0, tokens, channels) + 1).to(dtype), seeded_normal(2, 70).to(dtype)
    launches = _linear(x, weight, "none", device, bias=bias, residual=seeded_normal(3, tokens, 70).to(dtype))
    assert "code_narrow_kernel" in {python_function(launch.function).__name__ for launch in launches}
    if channels == 512:
        gates, arguments = quantized_weight(format, 2 * 37, channels, group), (None, "silu", dtype)
        check(gated_linear, x, gates.claimed(), *arguments, device=device, tolerance=GPU_KERNELS[dtype])


@pytest.mark.parametrize("format", ["int4", "int5", "int6", "int8", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_code_becomes_its_number(device: str, dtype: torch.dtype, format: str) -> None:
    """One channel of each token is 1, so that results are the numbers of codes."""
    bits, is_fp8 = CODE_FORMATS[format].bits, format == "fp8"
    index = (torch.arange(32)[:, None] + torch.arange(128) // 16 * 32) % (1 << bits)
    # e4m3 has no number for the largest ones.
    codes = torch.where(index % 128 == 127, 0, index) if is_fp8 else index - (1 << (bits - 1))
    weight = QuantizedWeight(codes.to(code_dtype(format)), torch.ones(32, 1), None, format)
    x = torch.zeros(8, 128, dtype=dtype)
    x[torch.arange(8), 16 * torch.arange(8) + torch.tensor([0, 5, 10, 15, 3, 6, 9, 12])] = 1
    arguments = (x, weight.claimed(), None, None, "identity", 1.0, dtype)
    launches = check(fused_linear, *arguments, device=device, tolerance=0.0)
    assert "code_narrow_kernel" in {python_function(launch.function).__name__ for launch in launches}


# Rows that end within a run, a byte's two channels or a group's last tile; more groups than a tile has; one row.
EXPANDED = [
    ("int4", 128, 384, True),
    ("int4", None, 31, False),
    ("int5", 32, 2144, True),
    ("int6", None, 100, False),
    ("int8", None, 1032, False),
    ("int8", 64, 64, True),
    ("fp8", 128, 2176, False),
    ("nf4", 64, 192, False),
    ("mxfp4", 32, 96, False),
    ("mxfp4", 16, 80, False),
    ("int4", 16, 64, True),
    *((format, None, 576, False) for format in BLOCKED),
]


@pytest.mark.parametrize(("format", "group", "channels", "has_zeros"), quick_sample(EXPANDED, EXPANDED[::3]))
@pytest.mark.parametrize("outputs", [1, 37])
def test_expanded_weights(
    device: str, format: str, group: int | None, channels: int, has_zeros: bool, outputs: int
) -> None:
    """Equal bits, except where one side rounds a product that the other fuses into a difference."""
    weight = quantized_weight(format, outputs, channels, group, asymmetric=has_zeros)
    for dtype in (torch.float32, torch.float16):
        arguments = (seeded_normal(0, 40, channels).to(dtype), weight.claimed(), None, dtype)
        call = TensorCall(linear, arguments, (torch.empty(40, outputs, dtype=dtype),), device, in_place=False)
        launches = {python_function(launch.function).__name__: launch for launch in call.candidates()}
        call.run(launches["expand_codes_kernel"])
        (wanted,) = values_of((weight.claimed(),))
        expanded = call.memory["buffer", "workspace_expanded"].view(outputs, channels)
        assert relative_error(expanded, wanted.to(dtype)) <= (1e-4 if CODE_FORMATS[format].has_minimum else 0.0)


def test_many_tokens_are_multiplied_by_the_library(device: str) -> None:
    """With the weight's values, for every product that the library knows."""
    gates, weight = quantized_weight("int4", 2 * 48, 256, 128), quantized_weight("q6_k", 40, 256, None)
    x, residual = seeded_normal(0, 40, 256).half(), seeded_normal(1, 40, 40).half()
    launches = _linear(x, weight, "none", device, residual=residual, activation="silu")
    launches += check(gated_linear, x, gates.claimed(), None, "silu", x.dtype, device=device, tolerance=1e-3)
    chains = [[python_function(part.function).__name__ for part in (launch, *launch.then)] for launch in launches]
    assert chains.count(["expand_codes_kernel", "matmul", "finish_product_kernel"]) == 2


@pytest.mark.parametrize("format", ["fp8", "int8"])
def test_many_rounded_tokens_are_multiplied_by_the_library(device: str, format: str) -> None:
    """Its sums get their scales in the launch that does what follows."""
    gates, weight = (quantized_weight(format, rows, 256, None) for rows in (2 * 48, 48))
    x, residual, bias = seeded_normal(0, 40, 256), seeded_normal(1, 40, 48), seeded_normal(2, 48)
    for dtype in (torch.bfloat16, torch.float16):
        launches = _linear(x.to(dtype), weight, format, device)
        more: Any = {"residual": residual.to(dtype), "bias": bias, "activation": "silu", "scale": 0.5}
        launches += _linear(x.to(dtype), weight, format, device, **more)
        tolerance = max(GPU_KERNELS[dtype], FP8_SUMS if device == "cuda" and format == "fp8" else 0.0)
        gated = (rounded(x.to(dtype), format), gates.claimed(), None, "silu", dtype)
        launches += check(gated_linear, *gated, device=device, tolerance=tolerance)
        chains = [[python_function(part.function).__name__ for part in (launch, *launch.then)] for launch in launches]
        count = chains.count(["quantize_tokens_kernel", f"{format}_matmul", "finish_product_kernel"])
        assert count == (0 if (format, device) == ("fp8", "a100") else 3)


@pytest.mark.parametrize("target", ["mi300x", pytest.param("a100", marks=pytest.mark.slow)])
def test_other_targets(device: str, target: str) -> None:
    if device == "cuda" and target == "mi300x":
        pytest.skip("its launches are not for this device")
    for format, group, x_format in (("int4", 128, "none"), ("int8", None, "int8"), ("fp8", None, "none")):
        for tokens in (1, 40):
            x = seeded_normal(0, tokens, 256).half()
            _linear(x, quantized_weight(format, 70, 256, group), x_format, device, target=target)


def test_split_sums(device: str) -> None:
    x = seeded_normal(0, 16, 2048).half()
    launches = _linear(x, quantized_weight("int4", 64, 2048, 64), "none", device)
    assert launches[0].constants["SPLITS"] == 8 and not launches[0].then, launches[0].constants
    assert python_function(launches[0].function).__name__ == "code_tile_kernel"


@pytest.mark.parametrize(
    ("format", "group"),
    [("int8", None), ("int6", None), ("int5", 32), ("int4", 32), ("fp8", None), ("nf4", 64), ("mxfp4", 16)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embedding(device: str, format: str, group: int | None, dtype: torch.dtype) -> None:
    weight = quantized_weight(format, 50, 192, group, asymmetric=format in ("int4", "int5"))
    ids = torch.tensor([3, 49, 0, 3], dtype=torch.int32)
    tolerance = 1e-7 if dtype is torch.float32 else 4e-3
    check(embedding, ids, weight.claimed(), dtype, device=device, tolerance=tolerance)


@pytest.mark.parametrize("format", BLOCKED)
def test_embedding_of_blocked_formats(device: str, format: str) -> None:
    """Equal bits, except where one side rounds a product that the other fuses into a difference."""
    weight, ids = quantized_weight(format, 50, 576, None), torch.tensor([3, 49, 0, 3], dtype=torch.int32)
    check(embedding, ids, weight.claimed(), torch.float32, device=device, tolerance=1e-7)


def test_channels_in_another_order(device: str) -> None:
    order = torch.randperm(100, generator=torch.Generator().manual_seed(0)).int()
    check(select_channels, seeded_normal(0, 5, 100).half(), order, device=device, tolerance=0.0)


def test_pairs_of_codes_lie_sixteen_channels_apart() -> None:
    codes = (torch.arange(80) % 16 - 8).to(torch.int8).view(2, 40)
    packed = code_rows(codes, Layout.CODE_PAIR_ROWS).view(2, 32)
    low, high = packed & 15, packed >> 4
    runs = torch.stack((low.view(2, 2, 16), high.view(2, 2, 16)), 2).reshape(2, 64)
    assert torch.equal(runs[:, :40].to(torch.int8) - 8, codes)
    assert code_rows(codes, Layout.CODE_ROWS).view(2, 48)[:, :40].equal(codes)


# 17 and 19 groups of 32 columns have steps that end within a byte.
@pytest.mark.parametrize("columns", [512, 544, 608])
@pytest.mark.parametrize("format", BLOCKED)
def test_rows_of_blocked_formats_are_read_back(format: str, columns: int) -> None:
    """Codes and steps, at the files' bits."""
    parts = blocked_parts(format, 3, columns)
    packed = blocked_rows(parts, format, code_rows_layout(format))
    assert packed.numel() == 3 * row_bytes(columns, code_rows_layout(format))
    slot = WeightSlot("codes", "U8", (3, columns), code_rows_layout(format), packed.numel())
    assert torch.equal(blocked_in_rows(packed, slot, WeightOf("codes", "I8", format, "codes")), parts["codes"])
    for name in (name for name in STEP_PARTS if name in parts):
        steps = blocked_rows(parts, format, Layout.STEP_ROWS)
        groups = parts[name].shape[1]
        assert steps.numel() == 3 * step_row_bytes(groups, format)
        slot = WeightSlot("steps", "U8", (3, groups), Layout.STEP_ROWS, steps.numel())
        assert torch.equal(blocked_in_rows(steps, slot, WeightOf("steps", "I8", format, name)), parts[name])


def test_steps_lie_in_their_bits() -> None:
    """Taken apart bit by bit, as code_rows.py describes them: of q4_k, 6 bits of a scale, then 6 of a minimum."""
    parts = blocked_parts("q4_k", 2, 512)
    rows = blocked_rows(parts, "q4_k", Layout.STEP_ROWS).view(2, 24).tolist()
    for row in range(2):
        string = int.from_bytes(bytes(rows[row]), "little")
        for group in range(16):
            assert string >> 12 * group & 63 == parts["scale_steps"][row, group]
            assert string >> 12 * group + 6 & 63 == parts["minimum_steps"][row, group]


@pytest.mark.parametrize(("format", "low"), [("q2_k", 2), ("q3_k", 2)])
def test_planes_of_two_bits(format: str, low: int) -> None:
    parts, zero = blocked_parts(format, 2, 256), CODE_FORMATS[format].unsigned_shift
    rows = blocked_rows(parts, format, code_rows_layout(format)).view(2, -1).tolist()
    for row in range(2):
        for channel in range(256):
            run, half, place = channel // 32, channel % 32 // 16, channel % 16
            code = rows[row][8 * run + place % 8] >> 4 * half + place // 8 * 2 & 3
            if format == "q3_k":
                code |= (rows[row][64 + 4 * run + place % 4] >> 4 * half + place // 4 & 1) << low
            assert code - zero == parts["codes"][row, channel]


@pytest.mark.parametrize(("layout", "bits"), [(Layout.CODE_5_ROWS, 5), (Layout.CODE_6_ROWS, 6)])
def test_bits_above_the_low_four_lie_behind_them(layout: Layout, bits: int) -> None:
    """Taken apart byte by byte, as code_rows.py describes them."""
    codes, more = torch.randint(-(1 << (bits - 1)), 1 << (bits - 1), (3, 70), dtype=torch.int8), bits - 4
    packed = code_rows(codes, layout).view(3, row_bytes(70, layout)).tolist()
    for row in range(3):
        for channel in range(70):
            run, half, byte = channel // 32, channel % 32 // 16, channel % 16
            low = packed[row][16 * run + byte] >> 4 * half & 15
            above = packed[row][3 * 16 + 4 * more * run + byte % (4 * more)] >> 4 * half
            high = above >> byte // (4 * more) * more & (1 << more) - 1
            assert (low | high << 4) - (1 << (bits - 1)) == codes[row, channel]
