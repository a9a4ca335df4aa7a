"""The kernels for codes compile for every instruction set: no spills, shared memory that fits, matrix instructions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from llmc.codegen.triton.compile import Workers
from llmc.codegen.triton.kernels.products.linear import fused_linear, gated_linear
from llmc.codegen.triton.kernels.rows.embedding import embedding
from llmc.codegen.triton.kernels.rows.select_channels import select_channels
from llmc.formats.code_format import CODE_FORMATS, TOKEN_GROUP
from llmc.graph.code_numbers import code_dtype
from llmc.program import DeviceKernel
from llmc.targets import GpuTarget
from tests.blocked_parts import BLOCKED
from tests.codegen.triton.claimed import normed, rounded
from tests.codegen.triton.offline_compile import OLDER_TRITON, compile_checked, largest, meta, node_kernels
from tests.codegen.triton.quantized_weight import QuantizedWeight, meta_blocked
from tests.gpu_target import EACH_KIND_OF_GPU, gpu_target, matrix_instruction
from tests.quick_sample import quick_sample

PRODUCTS = [
    *((name, format, 128, True, "none", None) for name in EACH_KIND_OF_GPU for format in ("int4", "int6")),
    # The RTX 4090 has the A100's tiles and instructions for integers.
    *(
        (name, "int8", None, False, "int8", g)
        for g in (None, TOKEN_GROUP)
        for name in EACH_KIND_OF_GPU
        if name != "rtx4090"
    ),
    *((name, "int4", 128, False, "int8", TOKEN_GROUP) for name in EACH_KIND_OF_GPU),
    *((name, "fp8", None, False, "fp8", None) for name in EACH_KIND_OF_GPU if gpu_target(name).fp8_rate is not None),
]
WITH_STEPS = [format for format in BLOCKED if CODE_FORMATS[format].steps is not None]
# Every kind of GPU, and every format, on one that has much to say of it.
QUICK = {
    "int4": ("h100", "b200", "mi300x"),
    "int6": ("h100",),
    "int8": ("a100",),
    "fp8": ("rtx4090",),
}


@pytest.mark.parametrize(
    ("name", "format", "group", "asymmetric", "x_format", "x_group"),
    [pytest.param(*product, marks=() if product[0] in QUICK[product[1]] else pytest.mark.slow) for product in PRODUCTS],
)
def test_products(
    name: str,
    format: str,
    group: int | None,
    asymmetric: bool,
    x_format: str,
    x_group: int | None,
    workers: Workers,
    tmp_path: Path,
) -> None:
    target = gpu_target(name)
    kernels = _linear(target, _weight(4096, 14336, format, group, asymmetric), x_format, x_group)
    kernels += _gated(target, format, group, x_format, x_group)
    assemblies = compile_checked(kernels, target, workers, tmp_path)
    for kernel, assembly in zip(kernels, assemblies, strict=True):
        if kernel.function == "code_tile_kernel":
            instructions = [matrix_instruction(name)]
            if OLDER_TRITON and name == "b200" and kernel.constants["OPERANDS"] == "int8":
                instructions.append("mma.sync")  # It has no other for integers.
            assert any(i in assembly for i in instructions), f"{kernel.constants} has none of {instructions}"


@pytest.mark.parametrize(
    ("format", "group", "x_format"),
    quick_sample(
        [
            ("int4", 32, "none"),
            ("int4", None, "none"),
            ("int5", 32, "none"),
            ("int5", 128, "none"),
            ("int6", None, "none"),
            ("int8", None, "none"),
            ("nf4", 64, "none"),
            ("mxfp4", 32, "none"),
            ("mxfp4", 16, "none"),
            ("fp8", 128, "none"),
            ("fp8", 128, "fp8"),
            ("int4", 128, "int8"),
            ("int4", 32, "int8"),
            ("int5", 128, "int8"),
            ("int6", 128, "int8"),
        ],
        [("int4", None, "none"), ("int5", 128, "none"), ("mxfp4", 16, "none"), ("int4", 128, "int8")],
    ),
)
def test_other_schemes(format: str, group: int | None, x_format: str, workers: Workers, tmp_path: Path) -> None:
    target = gpu_target("h100")
    weight = _weight(4096, 14336, format, group, False)
    compile_checked(_linear(target, weight, x_format), target, workers, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "format"),
    [
        (name, format)
        for name in EACH_KIND_OF_GPU
        for format in (BLOCKED if name in ("a100", "h100", "b200") else ("q4_k", "q6_k"))
    ],
)
def test_blocked_formats(name: str, format: str, workers: Workers, tmp_path: Path) -> None:
    target = gpu_target(name)
    weight = _weight(4096, 14336, format, None, False)
    kernels = _linear(target, weight, "none") + _linear(target, weight, "int8", TOKEN_GROUP)
    compile_checked(kernels + _gated(target, format, None, "none"), target, workers, tmp_path)


@pytest.mark.parametrize(
    ("name", "format", "x_format"),
    quick_sample(
        [(name, format, x) for name in ("a100", "h100", "b200") for format in WITH_STEPS for x in ("none", "int8")],
        [("h100", "q4_k", "none"), ("a100", "iq4_xs", "int8")],
    ),
)
def test_super_blocks_of_other_lengths(name: str, format: str, x_format: str, workers: Workers, tmp_path: Path) -> None:
    """At the sizes of SmolLM2 135M: rows of 576 columns have super-blocks of 288."""
    target, weight = gpu_target(name), meta_blocked(format, 1536, 576)
    compile_checked(_linear(target, weight, x_format, TOKEN_GROUP), target, workers, tmp_path)


@pytest.mark.parametrize(("format", "group"), [("int8", None), ("int4", 32)])
def test_gates_in_fp32(format: str, group: int | None, workers: Workers, tmp_path: Path) -> None:
    target, weight = gpu_target("h100"), _weight(768, 256, format, group, False)
    arguments = (meta(2, 256, dtype=torch.float32), weight.claimed(), None, "silu")
    kernels = [k for k in node_kernels(gated_linear, arguments, target) if k.function == "code_tile_kernel"]
    compile_checked(largest(kernels), target, workers, tmp_path)


@pytest.mark.parametrize("name", EACH_KIND_OF_GPU)
def test_memory_bound_kernels(name: str, workers: Workers, tmp_path: Path) -> None:
    target = gpu_target(name)
    codes, ids = meta(128256, 4096, dtype=torch.int8), meta(2, dtype=torch.int32)
    kernels: list[DeviceKernel] = []
    tables = [QuantizedWeight(codes, _scales(128256, n), None, f) for f, n in (("int8", 1), ("int4", 32), ("int6", 32))]
    for table in (*tables, meta_blocked("q6_k", 128256, 4096)):
        kernels += node_kernels(embedding, (ids, table.claimed(), torch.bfloat16), target)
    kernels += node_kernels(select_channels, (meta(2, 4096), meta(4096, dtype=torch.int32)), target)
    compile_checked(kernels, target, workers, tmp_path)


def _linear(
    target: GpuTarget, weight: QuantizedWeight, x_format: str, x_group: int | None = None
) -> list[DeviceKernel]:
    out, columns = weight.codes.shape
    x = rounded(meta(2, columns), x_format, group=x_group)
    arguments = (x, weight.claimed(), None, meta(2, out), "identity", 1.0, torch.bfloat16)
    return largest(node_kernels(fused_linear, arguments, target))


def _gated(
    target: GpuTarget, format: str, group: int | None, x_format: str, x_group: int | None = None
) -> list[DeviceKernel]:
    """At the sizes of Llama 3.1 8B, as those of the down projection above."""
    weight = _weight(28672, 4096, format, group, False)
    x = meta(2, 4096) if x_format == "none" else rounded(normed(meta(2, 4096), meta(4096)), x_format, group=x_group)
    return largest(node_kernels(gated_linear, (x, weight.claimed(), None, "silu", torch.bfloat16), target))


def _weight(out: int, columns: int, format: str, group: int | None, asymmetric: bool) -> QuantizedWeight:
    if CODE_FORMATS[format].is_blocked:
        return meta_blocked(format, out, columns)
    groups = 1 if group is None else columns // group
    zeros = meta(out, groups, dtype=torch.int8) if asymmetric else None
    return QuantizedWeight(meta(out, columns, dtype=code_dtype(format)), _scales(out, groups), zeros, format)


def _scales(out: int, groups: int) -> Tensor:
    return meta(out, groups, dtype=torch.float32 if groups == 1 else torch.bfloat16)
