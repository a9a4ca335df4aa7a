"""The kernels that put elements into their places compile without spills, in the instructions that are predicted."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from triton.tools.disasm import get_sass

from llmc.codegen.triton.compile import Workers
from llmc.codegen.triton.kernels.products.linear import fused_linear, gated_linear
from llmc.codegen.triton.kernels.products.sparse_ways import INSTRUCTIONS
from llmc.codegen.triton.kernels.rows.embedding import embedding
from llmc.program import DeviceKernel
from llmc.targets import GpuTarget
from tests.codegen.triton.claimed import Claimed, rounded
from tests.codegen.triton.offline_compile import OLDER_TRITON, compile_checked, largest, meta, node_kernels
from tests.gpu_target import EACH_KIND_OF_GPU, gpu_target

_OPS = torch.ops.llmc


@pytest.mark.skipif(OLDER_TRITON, reason="Triton 3.6 takes more instructions")
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.int8, marks=pytest.mark.slow)])
def test_an_element_takes_the_instructions_that_are_predicted(
    dtype: torch.dtype, workers: Workers, tmp_path: Path
) -> None:
    arguments = (meta(1, 14336), _weight(4096, 14336, dtype), None, meta(1, 4096), "identity", 1.0, torch.bfloat16)
    kernel = node_kernels(fused_linear, arguments, gpu_target("rtx4090"))[0]
    compile_checked([kernel], gpu_target("rtx4090"), workers, tmp_path)
    [binary] = tmp_path.glob("kernels/*.cubin")
    sizes = (kernel.constants.get(name, 1) for name in ("OUT_BLOCK", "IN_BLOCK", "CHUNKS", "CHUNK_BYTES"))
    elements = math.prod(int(size or 1) for size in sizes) / 32
    assert _loop_length(get_sass(binary.read_bytes())) / elements == pytest.approx(INSTRUCTIONS, rel=0.25)


def _loop_length(assembly: str) -> int:
    """Instructions of the longest loop."""
    lines = assembly.splitlines()
    labels = {line.strip().rstrip(":"): index for index, line in enumerate(lines) if line.strip().startswith("LBB")}
    jumps = ((index, re.search(r"BRA (LBB\d+)", line)) for index, line in enumerate(lines))
    return max(index - labels[jump[1]] for index, jump in jumps if jump is not None)


@pytest.mark.slow
@pytest.mark.parametrize("name", EACH_KIND_OF_GPU)
def test_products(name: str, workers: Workers, tmp_path: Path) -> None:
    compile_checked(_kernels(gpu_target(name)), gpu_target(name), workers, tmp_path)


def _kernels(target: GpuTarget) -> list[DeviceKernel]:
    x, residual = meta(2, 14336), meta(2, 4096)
    codes = _weight(4096, 14336, torch.int8)
    kernels = [
        *node_kernels(gated_linear, (meta(2, 4096), _weight(28672, 4096), None, "silu", torch.bfloat16), target),
        *(
            kernel
            for arrived, weight in ((x, _weight(4096, 14336)), (x, codes), (rounded(x, "int8"), codes))
            for kernel in node_kernels(
                fused_linear, (arrived, weight, None, residual, "identity", 1.0, torch.bfloat16), target
            )
        ),
    ]
    lookup = (meta(2, dtype=torch.int32), _weight(128256, 4096), torch.bfloat16)
    return largest(kernels) + node_kernels(embedding, lookup, target)


def _weight(out: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> Claimed:
    values, masks = meta(out * columns // 2, dtype=dtype), meta(out, columns // 64, dtype=torch.int64)
    if dtype is torch.int8:
        scales = meta(out, 1, dtype=torch.float32)
        return Claimed(_OPS.sparse_codes.default, (values, masks, scales, columns, "int8", torch.float32))
    return Claimed(_OPS.sparse_bitmask.default, (values, masks, columns, torch.float32))
