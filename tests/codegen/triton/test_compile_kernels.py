"""Every kernel compiles for every instruction set, without spilling, within the target's shared memory."""

from __future__ import annotations

import re
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from llmc.codegen.triton.compile import Workers
from llmc.codegen.triton.kernel import KernelTemplate
from llmc.codegen.triton.kernels.attention.kv_write import kv_write
from llmc.codegen.triton.kernels.attention.rope_kv_write import rope_kv_write
from llmc.codegen.triton.kernels.products.linear import (
    fused_linear,
    gated_linear,
    linear,
    lm_head,
)
from llmc.codegen.triton.kernels.rows.embedding import embedding
from llmc.codegen.triton.kernels.rows.gated_activation import gated_activation
from llmc.codegen.triton.kernels.rows.layer_norm import add_layer_norm
from llmc.codegen.triton.kernels.rows.rms_norm import add_rms_norm, rms_norm
from llmc.codegen.triton.kernels.rows.rope import rope
from llmc.codegen.triton.kernels.rows.rope_angles import rope_angles
from llmc.codegen.triton.kernels.rows.rotate_heads import rotate_heads
from llmc.errors import LoweringError
from llmc.program import DeviceKernel
from llmc.targets import GpuTarget
from tests.codegen.triton.claimed import normed
from tests.codegen.triton.offline_compile import compile_checked, largest, meta, node_kernels
from tests.gpu_target import EACH_KIND_OF_GPU, gpu_target


def _case(name: str, target: GpuTarget) -> list[DeviceKernel]:
    """The kernels that a node of the named kind needs on the target, or may be measured, at Llama 3.1 8B's sizes."""
    x, wide, angles = meta(2, 4096), meta(2, 14336), meta(2, 64, dtype=torch.float32)
    q, k, ints = meta(2, 32, 128), meta(2, 8, 128), meta(2, dtype=torch.int32)
    norm, cache = meta(4096), meta(4, 8, 16, 128)
    f32 = torch.float32
    cases: dict[str, tuple[KernelTemplate, tuple[Any, ...]]] = {
        "rms_norm of heads": (rms_norm, (q, meta(128), 1e-5)),
        "rms_norm of long rows": (rms_norm, (meta(2, 20000), meta(20000), 1e-5)),
        "add_rms_norm": (add_rms_norm, (x, x, norm, 1e-5)),
        "add_layer_norm": (add_layer_norm, (x, x, norm, norm, 1e-5)),
        "rope_angles": (rope_angles, (ints, meta(64, dtype=f32), 1.0)),
        "rope": (rope, (q, angles, angles, True)),
        "rotate_heads": (rotate_heads, (q, 128)),
        "kv_write": (kv_write, (k, k, cache, cache, ints)),
        "rope_kv_write": (rope_kv_write, (q, k, k, angles, angles, cache, cache, ints, False)),
        "embedding": (embedding, (ints, meta(128256, 4096))),
        "gated_activation": (gated_activation, (wide, wide, "silu")),
        "linear, odd": (linear, (meta(2, 1000), meta(777, 1000), meta(777))),
        "linear in fp32": (linear, (meta(2, 576, dtype=f32), meta(960, 576, dtype=f32), None)),
        "fused_linear": (fused_linear, (wide, meta(4096, 14336), None, x, "identity", 1.0)),
        "lm_head": (lm_head, (x, meta(128256, 4096), None)),
        "gated_linear after a norm": (gated_linear, (normed(x, norm), meta(28672, 4096), None, "silu")),
    }
    template, arguments = cases[name]
    return largest(node_kernels(template, arguments, target))


SIMPLE = [
    "rms_norm of heads",
    "rms_norm of long rows",
    "add_rms_norm",
    "add_layer_norm",
    "rope_angles",
    "rope",
    "rotate_heads",
    "kv_write",
    "rope_kv_write",
    "embedding",
    "gated_activation",
]
# A norm's product has the kernels of one without among its candidates.
PRODUCTS = [
    *(("fused_linear", target) for target in EACH_KIND_OF_GPU),
    *(
        # The A100 and the RTX 4090 compile fused_linear from the same source, to the same instructions.
        pytest.param("gated_linear after a norm", name, marks=pytest.mark.slow if name in ("a100", "rtx4090") else ())
        for name in EACH_KIND_OF_GPU
    ),
    ("lm_head", "h100"),
    ("linear, odd", "h100"),
    ("linear in fp32", "h100"),
    ("linear in fp32", "mi300x"),
]


@pytest.mark.parametrize("name", EACH_KIND_OF_GPU)
def test_memory_bound_kernels(name: str, workers: Workers, tmp_path: Path) -> None:
    target = gpu_target(name)
    kernels = [
        replace(kernel, name=f"{kernel.name}_{i}") for i, case in enumerate(SIMPLE) for kernel in _case(case, target)
    ]
    compile_checked(kernels, target, workers, tmp_path)


@pytest.mark.parametrize(("case", "name"), PRODUCTS)
def test_products(case: str, name: str, workers: Workers, tmp_path: Path) -> None:
    target = gpu_target(name)
    kernels = _case(case, target)
    instruction = {90: "wgmma.mma_async", 100: "tcgen05.mma", "gfx942": "v_mfma"}.get(target.arch, "mma.sync")
    for kernel, assembly in zip(kernels, compile_checked(kernels, target, workers, tmp_path), strict=True):
        on_matrix_units = kernel.function in ("narrow_kernel", "tile_kernel", "persistent_kernel")
        if on_matrix_units and case != "linear in fp32":
            assert instruction in assembly, f"{kernel.function} {kernel.constants} has no {instruction}"
        if kernel.function == "persistent_kernel":
            assert "cp.async.bulk.tensor" in assembly
        if int(kernel.constants.get("SPLITS") or 1) > 1 and isinstance(target.arch, int):
            # The stores of all threads before the release, the loads of all behind the acquire.
            in_order = r"st\.global.*bar\.sync.*atom\.global\.gpu\.acq_rel\.add.*bar\.sync.*ld\.global"
            assert re.search(in_order, assembly, re.DOTALL), kernel.constants
    functions = {kernel.function for kernel in kernels}
    expected = {"gemv_kernel", "narrow_kernel"}
    if case != "linear in fp32":
        expected |= {"tile_kernel", *(("persistent_kernel",) if target.has_tma and case != "linear, odd" else ())}
    assert functions - {"norm_kernel", "finish_product_kernel"} == expected


def test_more_shared_memory_than_a_block_has_is_refused(workers: Workers, tmp_path: Path) -> None:
    small = replace(gpu_target("h100"), shared_memory_per_block=15)
    (kernel, *_) = _case("rms_norm of long rows", small)
    (tmp_path / "kernels").mkdir()
    with pytest.raises(LoweringError, match=r"needs \d+ bytes of shared memory a block; h100 has 15") as caught:
        workers.compile(kernel, small, tmp_path)
    assert kernel.function in str(caught.value.at)


def test_an_error_does_not_wait_for_workers_that_start() -> None:
    with pytest.raises(ValueError, match="no such model"), Workers(1) as workers:
        workers.start()
        raise ValueError("no such model")
    assert [process.process.returncode for process in workers._processes] == [-signal.SIGKILL]
