"""Kernels for adapters, and products that add what those say, compile for every instruction set without spilling."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from llmc.codegen.triton.compile import Workers
from llmc.codegen.triton.kernels.products.linear import fused_linear, gated_linear, linear
from llmc.codegen.triton.kernels.products.lora import lora
from tests.codegen.triton.claimed import normed
from tests.codegen.triton.offline_compile import compile_checked, largest, meta, node_kernels
from tests.gpu_target import EACH_KIND_OF_GPU, gpu_target
from tests.quick_sample import quick_sample

INTS = meta(2, dtype=torch.int32)


@pytest.mark.parametrize("name", quick_sample(EACH_KIND_OF_GPU, ("h100",)))
@pytest.mark.parametrize("dtype", quick_sample([torch.bfloat16, torch.float32], [torch.bfloat16]))
def test_adapters(name: str, dtype: torch.dtype, workers: Workers, tmp_path: Path) -> None:
    """Of q, k and v at Llama 3.1 8B's sizes, 32 of ranks up to 64."""
    x, ranks = meta(2, 4096, dtype=dtype), meta(32, 3, dtype=torch.int32)
    a, b = meta(32, 3, 64, 4096, dtype=dtype), meta(32, 64, 6144, dtype=dtype)
    arguments = (normed(x, meta(4096, dtype=dtype)), a, b, ranks, INTS, [4096, 5120, 6144])
    kernels = node_kernels(lora, arguments, gpu_target(name))
    assert [kernel.function for kernel in kernels] == ["norm_kernel", "lora_shrink_kernel", "lora_expand_kernel"]
    compile_checked(kernels, gpu_target(name), workers, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", EACH_KIND_OF_GPU)
@pytest.mark.parametrize("op", ["linear", "fused_linear", "gated_linear"])
def test_products(op: str, name: str, workers: Workers, tmp_path: Path) -> None:
    x, delta = meta(2, 4096), meta(2, 28672, dtype=torch.float32)
    template, arguments = {
        "linear": (linear, (x, meta(6144, 4096), None, None, meta(2, 6144, dtype=torch.float32), INTS)),
        "fused_linear": (
            fused_linear,
            (x, meta(4096, 4096), None, x, "identity", 1.0, None, meta(2, 4096, dtype=torch.float32), INTS),
        ),
        "gated_linear": (gated_linear, (normed(x, meta(4096)), meta(28672, 4096), None, "silu", None, delta, INTS)),
    }[op]
    kernels = largest(node_kernels(template, arguments, gpu_target(name)))
    compile_checked(kernels, gpu_target(name), workers, tmp_path)
