"""Launch kernels as they are compiled for a GPU, on the CPU: their PTX in the machine of llmc/ptx, with its checks."""

from __future__ import annotations

import re
import struct
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llmc.codegen.triton.compile import Workers
from llmc.program import DeviceBinary, DeviceKernel
from llmc.ptx.code import Code, load_code
from llmc.ptx.global_memory import Buffer
from llmc.ptx.machine import Report, execute
from tests.codegen.triton.execution_differences import Differences
from tests.gpu_target import gpu_target

_SPACING = 1 << 36


class PtxDevice(str):
    """The name of a GPU, where a test names a device. compiler: what compiles for it, asked for at the first launch.
    differences: from what Triton's interpreter does, where a launch is made by both."""

    compiler: Callable[[], Workers]
    differences: Differences

    @staticmethod
    def of(name: str, compiler: Callable[[], Workers], differences: Differences | None = None) -> PtxDevice:
        """The device of a GPU's name."""
        device = PtxDevice(name)
        device.compiler, device.differences = compiler, differences or Differences(None)
        return device

    def code(self, kernel: DeviceKernel, edits: Sequence[tuple[str, str]] = ()) -> tuple[Code, DeviceBinary]:
        """A kernel, compiled and made ready."""
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "kernels").mkdir()
            compiled = self.compiler().compile(kernel, gpu_target(self), Path(folder))
            binary, text = compiled.binary, compiled.assembly.read_text(encoding="utf-8")
        for pattern, new in edits:
            text, count = re.subn(pattern, new, text, count=1)
            assert count, f"nothing in the PTX matches {pattern!r}"
        return _ready(text, kernel.function, binary.threads, binary.shared_bytes), binary


@lru_cache(maxsize=32)
def _ready(text: str, name: str, threads: int, shared_bytes: int) -> Code:
    """Tests launch the same kernels again and again. One takes some megabytes: not all of them fit."""
    return load_code(text, f"{name}.ptx", threads=threads, shared_bytes=shared_bytes)


def run_ptx(
    device: PtxDevice,
    kernel: DeviceKernel,
    grid: tuple[int, ...],
    arguments: Mapping[str, Any],
    buffers: list[Buffer],
    edits: Sequence[tuple[str, str]] = (),
) -> None:
    """Launch a kernel; fails if the checks find anything. arguments: numbers, and the address of each pointer."""
    report = launch_compiled(device, kernel, grid, arguments, buffers, edits=edits)
    assert not report.findings, "\n".join(map(str, report.findings))


def launch_compiled(
    device: PtxDevice,
    kernel: DeviceKernel,
    grid: tuple[int, ...],
    arguments: Mapping[str, Any],
    buffers: list[Buffer],
    outputs: Sequence[Buffer] = (),
    edits: Sequence[tuple[str, str]] = (),
) -> Report:
    """Launch a kernel. edits: patterns whose first match in its PTX is replaced."""
    code, binary = device.code(kernel, edits)
    x, y, z = (*grid, 1, 1)[:3]
    values = [_packed(arguments[p.name], p.type) for p in kernel.parameters]
    scratch = np.zeros(max(16, x * y * z * binary.scratch_bytes), np.uint8)
    area = Buffer("scratch", 1 << 60, scratch, may_change=False)
    values += [struct.pack("<Q", area.address if i == 0 else 0) for i in range(binary.extra_pointers)]
    return execute(code, (x, y, z), values, [*buffers, area], outputs=outputs)


def _packed(value: Any, kind: str) -> bytes:
    return struct.pack("<f4x", value) if kind == "fp32" else struct.pack("<Q" if kind[0] == "*" else "<q", value)


def buffer_of(name: str, place: int, tensor: Tensor, written: Tensor | None, *, is_writable: bool) -> Buffer:
    """A tensor of the CPU as a buffer of a launch. written: which of its bytes have a value, None for all."""
    octets = tensor.reshape(-1).view(torch.uint8).numpy()
    marks = None if written is None else written.reshape(-1).view(torch.uint8).numpy()
    return Buffer(name, (place + 1) * _SPACING, octets, is_writable=is_writable, written=marks)
