"""Compile the kernels that a node needs on a target, without a GPU, and check what they need of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from llmc.codegen.triton.compile import Workers
from llmc.codegen.triton.kernel import KernelTemplate, LibraryFunction
from llmc.program import DeviceKernel
from llmc.targets import GpuTarget
from tests.codegen.triton.claimed import values_of
from tests.codegen.triton.specialized_kernel import specialized_kernel
from tests.codegen.triton.tensor_call import TensorCall

# Older than the one that the tests were written with; such as 3.7, which torch 2.13 brings along.
OLDER_TRITON = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9)


def node_kernels(template: KernelTemplate, arguments: Sequence[Any], target: GpuTarget) -> list[DeviceKernel]:
    """Every kernel of every candidate, none of a library. arguments: the op's; tensors of the device meta will do."""
    returned = template.op(*values_of(arguments))
    expected = () if returned is None else (returned,) if isinstance(returned, Tensor) else tuple(returned)
    call = TensorCall(template, arguments, expected, "meta", in_place=False)
    launches = template.candidates(call, target)
    steps = [x for launch in launches for x in (launch, *launch.then) if not isinstance(x.function, LibraryFunction)]
    kernels: list[DeviceKernel] = []
    for step in steps:
        kernel = specialized_kernel(call.memory, step, f"{template.op._schema.name.split('::')[1]}.{len(kernels)}")
        if all(replace(kernel, name=other.name) != other for other in kernels):
            kernels.append(kernel)
    return kernels


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor without data: launches depend on shapes and types alone."""
    return torch.empty(shape, dtype=dtype, device="meta")


def largest(kernels: Sequence[DeviceKernel]) -> list[DeviceKernel]:
    """Of each function, in each of its modes, the one with the largest tile: the others need fewer registers and less
    shared memory."""
    by_tile: dict[tuple[Any, ...], DeviceKernel] = {}
    for kernel in kernels:
        key = kernel.function, *(_mode(name, value) for name, value in sorted(kernel.constants.items()))
        if key not in by_tile or _tile(kernel) > _tile(by_tile[key]):
            by_tile[key] = kernel
    return list(by_tile.values())


# What Triton 3.7 leaves in memory of some products of codes, and of prompts' attention on a B200, and 3.9 does not.
_OLDER_TRITON_SPILLS = 168
_SIZES = ("TOKENS", "TOKEN_BLOCK", "OUT_BLOCK", "IN_BLOCK", "CHUNKS", "CHUNK_BYTES", "BYTE_BLOCK", "BLOCK", "ROWS")


def _mode(name: str, value: Any) -> Any:
    if name in _SIZES:
        return None
    return int(value) > 1 if name == "SPLITS" else value


def _tile(kernel: DeviceKernel) -> int:
    return math.prod(int(kernel.constants.get(name) or 1) for name in _SIZES)


def compile_checked(kernels: Sequence[DeviceKernel], target: GpuTarget, workers: Workers, directory: Path) -> list[str]:
    """The assemblies, in the kernels' order. Fails on a spill, and on more registers than a block of threads has.

    Too much shared memory raises LoweringError.
    """
    (directory / "kernels").mkdir(exist_ok=True)
    assemblies = []
    # Kernels of several nodes may share a name, which is that of the files that they are written to.
    renamed = [replace(kernel, name=f"{kernel.name}.{i}") for i, kernel in enumerate(kernels)]
    compiled = workers.compile_all(renamed, target, directory)
    for kernel, result in zip(kernels, compiled, strict=True):
        spilled = result.binary.spill_bytes
        if kernel.function == "rope_angles_kernel" and spilled <= 32:
            spilled = 0  # With Triton 3.6: the stack frame of the sine's slow path for huge angles, and no register.
        if OLDER_TRITON and spilled <= _OLDER_TRITON_SPILLS:
            spilled = 0
        needs, most = result.binary, most_registers(target, result.binary.threads)
        assert spilled == 0, f"{kernel.function} {kernel.constants} spills {spilled} bytes for {target.arch_name}"
        assert 0 < needs.registers <= most, (
            f"{kernel.function} {kernel.constants}: {needs.registers} of {most} registers"
        )
        assert needs.shared_bytes <= target.shared_memory_per_block
        assemblies.append(result.assembly.read_text(encoding="utf-8"))
    return assemblies


def most_registers(target: GpuTarget, threads: int) -> int:
    """Registers that a thread of such a block can have.

    CUDA: 65536 in a multiprocessor, 255 of a thread. gfx942: 512 vector registers for each lane of its four SIMD units,
    among which a block's warps are divided.
    """
    if target.backend == "cuda":
        return min(255, 65536 // threads)
    return 512 // max(1, threads // target.warp_size // 4)
