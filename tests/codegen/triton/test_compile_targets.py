"""Kernels that no other test compiles for every instruction set: registers that there are, no spills, shared memory.

One representative each, with the tile that is chosen without measuring; test_compile_attention.py,
test_compile_kernels.py and test_compile_quantized.py compile the others.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from llmc.codegen.triton.compile import Workers
from llmc.codegen.triton.kernels.attention.kv_write import kv_write
from llmc.codegen.triton.kernels.attention.paged_attention import paged_attention
from llmc.codegen.triton.kernels.attention.rope_kv_write import rope_kv_write
from llmc.codegen.triton.kernels.products.linear import linear
from llmc.codegen.triton.lowering import lower_device
from llmc.options import BuildOptions
from llmc.program import DeviceKernel
from llmc.targets import GpuTarget
from tests.codegen.tiny_models import GraphBuilder, aten, ops
from tests.codegen.triton.claimed import normed
from tests.codegen.triton.coded_attention import coded_attention, coded_cache, newest_apart
from tests.codegen.triton.offline_compile import compile_checked, largest, meta, node_kernels
from tests.gpu_target import EACH_KIND_OF_GPU, each_kind_of_gpu, gpu_target


def logits_step(target: GpuTarget, directory: Path) -> list[DeviceKernel]:
    """Generated loops of one block and of several, the gather of logit rows, lm_head, and lm_head with argmax."""
    b = GraphBuilder(torch.bfloat16)
    table = b.weight("embed", 32000, 256)
    x = b.call(ops.embedding.default, b.inputs["input_ids"], table)
    centred = b.call(aten.sub.Tensor, x, b.call(aten.mean.dim, x, [-1], True))
    wide = b.call(ops.embedding.default, b.inputs["input_ids"], b.weight("wide", 100, 9001))
    scale = b.call(aten.amax.default, b.call(aten._softmax.default, wide, -1, False), [-1], True)
    rows = b.call(ops.select_rows.default, b.call(aten.mul.Tensor, centred, scale), b.inputs["logit_rows"])
    lowered = lower_device(b.finish(b.call(ops.lm_head.default, rows, table))[0], target, BuildOptions())
    for file, text in lowered.sources.items():
        (directory / file).parent.mkdir(exist_ok=True)
        (directory / file).write_text(text, encoding="utf-8")
    kernels = largest(lowered.program.launched_kernels())
    expected = {"gather_rows_kernel", "gemv_kernel", "narrow_kernel", "best_gemv_kernel", "best_narrow_kernel"}
    chosen = [k for k in kernels if k.function in expected or k.source.endswith("loops.py")]
    assert {k.function for k in chosen if not k.source.endswith("loops.py")} == expected
    assert len(chosen) >= len(expected) + 2
    return chosen


def norm_products(target: GpuTarget, directory: Path) -> list[DeviceKernel]:
    """Few rows, whose norm is in the product's own kernel."""
    arguments = (normed(meta(2, 4096), meta(4096)), meta(6144, 4096))
    kernels = largest(node_kernels(linear, arguments, target))
    in_product = [
        k for k in kernels if k.function in ("gemv_kernel", "narrow_kernel") and "norm_ptr" not in k.constants
    ]
    chosen = [k for k in in_product if k.constants.get("SPLITS", 1) == 1]
    assert {k.function for k in chosen} == {"gemv_kernel", "narrow_kernel"}
    return chosen


def code_writes(target: GpuTarget, directory: Path) -> list[DeviceKernel]:
    """Keys as they are, and keys that are turned first."""
    q, k, angles, slots = meta(2, 32, 128), meta(2, 8, 128), meta(2, 64).float(), meta(2, dtype=torch.int32)
    int8, int4 = (coded_cache(format, 8, 128) for format in ("int8", "int4:g32"))
    kernels = node_kernels(kv_write, (k, k, int8, int8, slots, "int8"), target)
    kernels += node_kernels(rope_kv_write, (q, k, k, angles, angles, int4, int4, slots, False, "int4:g32"), target)
    return [kernel for kernel in kernels if kernel.function == "code_write_kernel"]


def coded_decode_and_prefill(target: GpuTarget, directory: Path) -> list[DeviceKernel]:
    """Of Llama 3 over 4-bit keys and values with groups, which take the most registers."""
    return list(
        {
            kernel.function: kernel
            for kernel in reversed(node_kernels(paged_attention, coded_attention("int4:g32", 32, 8, 128), target))
        }.values()
    )


def newest_decode_and_prefill(target: GpuTarget, directory: Path) -> list[DeviceKernel]:
    """The same with newest rows in other caches, and with trees."""
    arguments = newest_apart(coded_attention("int4:g32", 32, 8, 128), 128)
    return node_kernels(paged_attention, arguments, target)


CASES: tuple[Callable[[GpuTarget, Path], list[DeviceKernel]], ...] = (
    logits_step,
    norm_products,
    code_writes,
    coded_decode_and_prefill,
    newest_decode_and_prefill,
)


@pytest.mark.parametrize("name", each_kind_of_gpu("rtx4090", "h100", "mi300x"))
def test_kernels_fit(name: str, workers: Workers, tmp_path: Path) -> None:
    target = gpu_target(name)
    kernels = [kernel for case in CASES for kernel in case(target, tmp_path)]
    compile_checked(kernels, target, workers, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", EACH_KIND_OF_GPU)
@pytest.mark.parametrize("format", ["int8", "fp8", "int4:g32", "int4:head"])
@pytest.mark.parametrize("newest", [0, 128])
def test_every_tile_over_codes_fits(name: str, format: str, newest: int, workers: Workers, tmp_path: Path) -> None:
    """The heads of Llama 3.2 1B, of Llama 3, of Phi-3 and of Gemma 2."""
    target, kernels = gpu_target(name), list[DeviceKernel]()
    for heads, kv_heads, dim in ((32, 8, 64), (32, 8, 128), (32, 32, 96), (16, 8, 256)):
        extras = (4096, 50.0) if dim == 256 else (None, None)
        if format == "int4:g32" and dim == 96:
            continue  # Half of a head is not a whole number of groups.
        arguments = coded_attention(format, heads, kv_heads, dim, *extras)
        kernels += node_kernels(paged_attention, newest_apart(arguments, newest) if newest else arguments, target)
    compile_checked(kernels, target, workers, tmp_path)
