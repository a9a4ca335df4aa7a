"""The kernels of experts compile offline, at the sizes of mixtures that there are, without spills."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from llmc.codegen.triton.compile import Workers
from llmc.codegen.triton.kernels.experts.choose_channels import mark_channels, take_channels, top_k
from llmc.codegen.triton.kernels.experts.expert_linear import expert_linear
from llmc.codegen.triton.kernels.experts.sum_experts import sum_experts
from llmc.formats.code_format import CODE_FORMATS, TOKEN_GROUP
from llmc.graph.code_numbers import code_dtype
from llmc.program import DeviceKernel
from llmc.targets import GpuTarget
from tests.codegen.triton.claimed import rounded
from tests.codegen.triton.offline_compile import OLDER_TRITON, compile_checked, meta, node_kernels
from tests.codegen.triton.quantized_weight import QuantizedWeight, meta_blocked
from tests.gpu_target import EACH_KIND_OF_GPU, gpu_target, matrix_instruction
from tests.quick_sample import quick_sample

INDEX = torch.int32
slow = pytest.mark.slow


def _product(
    target: GpuTarget, experts: int, slots: int, out: int, channels: int, format: str | None
) -> list[DeviceKernel]:
    index, rows = meta(2, slots, dtype=INDEX), experts * out
    if format is None:
        return node_kernels(
            expert_linear, (meta(2, channels), meta(rows, channels), None, index, experts, None), target
        )
    weight = QuantizedWeight(
        meta(rows, channels, dtype=code_dtype(format)), meta(rows, channels // 32), None, format
    ).claimed()
    x, bias = meta(2, slots, channels), meta(rows)
    return node_kernels(expert_linear, (x, weight, bias, index, experts, None), target)


@pytest.mark.parametrize(
    ("name", "format"),
    [
        pytest.param(name, format, marks=() if name == "h100" and format != "int8" else slow)
        for name in EACH_KIND_OF_GPU
        for format in (None, "mxfp4", "int4", "int8")
    ],
)
def test_products_compile(name: str, format: str | None, workers: Workers, tmp_path: Path) -> None:
    """Mixtral's down projection as numbers, gpt-oss's in codes."""
    target = gpu_target(name)
    sizes = (8, 2, 4096, 14336) if format is None else (32, 4, 2880, 2880)
    compile_checked(_product(target, *sizes, format), target, workers, tmp_path)


# What W is stored as, the columns that share a scale, and what x is rounded to.
CODED_TOKENS = [
    ("int8", None, "int8", None),
    ("int8", None, "int8", TOKEN_GROUP),
    ("int4", 64, "int8", None),
    ("int4", 64, "int8", TOKEN_GROUP),
    ("int5", 32, "int8", TOKEN_GROUP),
    ("int6", 64, "int8", None),
    ("q4_k", None, "int8", TOKEN_GROUP),
    ("q6_k", None, "int8", TOKEN_GROUP),
    ("fp8", None, "fp8", None),
]


@pytest.mark.parametrize(
    ("name", "format", "group", "x_format", "x_group"),
    quick_sample(
        [
            (name, *each)
            for name in EACH_KIND_OF_GPU
            for each in CODED_TOKENS
            if each[2] != "fp8" or gpu_target(name).fp8_rate is not None
        ],
        [("h100", *CODED_TOKENS[3]), ("a100", *CODED_TOKENS[0])],
    ),
)
def test_products_of_tokens_in_codes_compile(
    name: str, format: str, group: int | None, x_format: str, x_group: int | None, workers: Workers, tmp_path: Path
) -> None:
    """Mixtral's down projection, whose x is a row for each slot; and with the matrix units' instruction."""
    target, (experts, slots, out, channels) = gpu_target(name), (8, 2, 4096, 14336)
    if CODE_FORMATS[format].is_blocked:
        weight = meta_blocked(format, experts * out, channels)
    else:
        codes = meta(experts * out, channels, dtype=code_dtype(format))
        groups, dtype = (1, torch.float32) if group is None else (channels // group, torch.bfloat16)
        weight = QuantizedWeight(codes, meta(experts * out, groups, dtype=dtype), None, format)
    x = rounded(meta(2, slots, channels), x_format, group=x_group)
    arguments = (x, weight.claimed(), None, meta(2, slots, dtype=INDEX), experts, torch.bfloat16)
    kernels = node_kernels(expert_linear, arguments, target)
    assemblies = compile_checked(kernels, target, workers, tmp_path)
    (product,) = (text for k, text in zip(kernels, assemblies, strict=True) if k.function == "expert_code_tile_kernel")
    instructions = [matrix_instruction(name)]
    if OLDER_TRITON and name == "b200" and x_format == "int8":
        instructions.append("mma.sync")  # It has no other for integers.
    assert any(each in product for each in instructions)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "h100" else slow) for n in EACH_KIND_OF_GPU])
def test_routers_compile(name: str, workers: Workers, tmp_path: Path) -> None:
    """DeepSeek's: the best of 256 experts in 8 groups."""
    target, f32 = gpu_target(name), torch.float32
    kernels = [
        *node_kernels(top_k, (meta(2, 8, 32, dtype=f32), 2), target),
        *node_kernels(top_k, (meta(2, 256, dtype=f32), 8), target),
        *node_kernels(take_channels, (meta(2, 256, dtype=f32), meta(2, 8, dtype=INDEX)), target),
        *node_kernels(mark_channels, (meta(2, 4, dtype=INDEX), 8), target),
        *node_kernels(sum_experts, (meta(2, 8, 7168), meta(2, 8, dtype=f32)), target),
    ]
    compile_checked(kernels, target, workers, tmp_path)
