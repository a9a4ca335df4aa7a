"""The attention and sampling kernels compile for every instruction set: no spills, shared memory that fits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from llmc.codegen.triton.compile import Workers
from llmc.codegen.triton.kernels.attention.paged_attention import paged_attention
from llmc.codegen.triton.kernels.products.head_linear import head_linear
from llmc.codegen.triton.kernels.sampling.draw_rows import argmax_rows, draw_rows
from llmc.codegen.triton.kernels.sampling.row_masses import row_masses
from llmc.codegen.triton.kernels.sampling.sample_candidates import sample_candidates
from llmc.codegen.triton.kernels.sampling.top_k_rows import top_k_rows
from tests.codegen.triton.offline_compile import compile_checked, meta, node_kernels
from tests.gpu_target import EACH_KIND_OF_GPU, each_kind_of_gpu, gpu_target, matrix_instruction
from tests.quick_sample import quick_sample


@pytest.mark.parametrize("name", each_kind_of_gpu("rtx4090", "h100", "b200", "mi300x"))
def test_attention_of_llama_3_and_of_gemma_2(name: str, workers: Workers, tmp_path: Path) -> None:
    """Head dimension 128 and 256, the second with every option that costs registers."""
    target = gpu_target(name)
    kernels = node_kernels(paged_attention, _with_trees(*_attention(32, 8, 128)), target)
    if name != "rtx4090":  # It has the A100's tiles, from the same source.
        kernels += node_kernels(paged_attention, _with_trees(*_attention(16, 8, 256), 4096, 50.0), target)
    assemblies = compile_checked(kernels, target, workers, tmp_path)
    for kernel, assembly in zip(kernels, assemblies, strict=True):
        if kernel.function == "paged_prefill_kernel" and not kernel.constants["TREES"]:
            instruction = matrix_instruction(name)
            assert instruction in assembly, f"{kernel.constants} has no {instruction}"


@pytest.mark.parametrize(
    ("name", "heads", "kv_heads", "head_dim", "dtype"),
    [
        ("h100", 32, 8, 64, torch.bfloat16),
        pytest.param("h100", 32, 32, 96, torch.float16, marks=pytest.mark.slow),
        ("a100", 71, 1, 64, torch.bfloat16),
        pytest.param("a100", 28, 4, 80, torch.float16, marks=pytest.mark.slow),
        ("h100", 32, 8, 128, torch.float32),
    ],
)
def test_other_heads(
    name: str, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, workers: Workers, tmp_path: Path
) -> None:
    target = gpu_target(name)
    sinks = meta(heads, dtype=torch.float32)
    arguments = _with_trees(*_attention(heads, kv_heads, head_dim, dtype), 128, None, sinks)
    compile_checked(node_kernels(paged_attention, arguments, target), target, workers, tmp_path)


@pytest.mark.parametrize("name", each_kind_of_gpu("rtx4090", "a100", "h100", "b200", "mi300x"))
@pytest.mark.parametrize("dtype", quick_sample([torch.bfloat16, torch.float32], [torch.bfloat16]))
def test_attention_of_deepseek_v3(name: str, dtype: torch.dtype, workers: Workers, tmp_path: Path) -> None:
    """128 heads over latents of 512 channels, with trees, and what goes before and after it."""
    target = gpu_target(name)
    *_, starts, lengths, tables, scale = _attention(128, 1, 64, dtype)
    caches = meta(64, 1, 16, 64, dtype=dtype), meta(64, 1, 16, 512, dtype=dtype)
    arguments = _with_trees(meta(8, 128, 576, dtype=dtype), *caches, starts, lengths, tables, scale)
    kernels = node_kernels(paged_attention, (*arguments, None, None, True), target)
    for out, channels in ((512, 128), (128, 512)):
        operands = meta(8, 128, channels, dtype=dtype), meta(128, out, channels, dtype=dtype)
        kernels += node_kernels(head_linear, operands, target)
    compile_checked(kernels, target, workers, tmp_path)


@pytest.mark.parametrize("name", EACH_KIND_OF_GPU)
def test_sampling(name: str, workers: Workers, tmp_path: Path) -> None:
    target = gpu_target(name)
    logits, of_a_row = meta(4, 128256, dtype=torch.float32), meta(4, dtype=torch.float32)
    integers = of_a_row.int()
    values, indices = torch.ops.llmc.top_k_rows.default(logits, 64)
    draw = (values, indices, of_a_row, integers, of_a_row, integers, of_a_row, of_a_row, integers, integers, False)
    kernels = node_kernels(argmax_rows, (logits,), target) + node_kernels(top_k_rows, (logits, 64), target)
    kernels += node_kernels(draw_rows, (logits, of_a_row, integers, integers), target)
    kernels += node_kernels(row_masses, (logits, values, of_a_row), target)
    kernels += node_kernels(sample_candidates, draw, target)
    compile_checked(kernels, target, workers, tmp_path)


def _attention(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor | float, ...]:
    cache = meta(64, kv_heads, 16, head_dim, dtype=dtype)
    indices = (meta(3, dtype=torch.int32), meta(2, dtype=torch.int32), meta(2, 8192, dtype=torch.int32))
    return (meta(8, heads, head_dim, dtype=dtype), cache, cache, *indices, head_dim**-0.5)


def _with_trees(*arguments: Tensor | float | None) -> tuple[Tensor | float | None, ...]:
    """With masks for trees, as engines have them."""
    return (*arguments, *[None] * (12 - len(arguments)), meta(8, dtype=torch.int64))
