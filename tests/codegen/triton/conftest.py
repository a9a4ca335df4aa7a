"""Where a kernel's cases run: interpreted on the CPU, and the same ones on a device with `pytest -m gpu`.

The process that compiles is that of all tests: it takes seconds to import torch and Triton.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from llmc.codegen.triton.compile import Workers
from tests.codegen.triton.execution_differences import Differences
from tests.codegen.triton.ptx_device import PtxDevice
from tests.kept_compiler import KeptCompiler


@pytest.fixture
def workers(compiler: KeptCompiler) -> Workers:
    return compiler.workers()


@pytest.fixture(scope="session")
def differences(request: pytest.FixtureRequest) -> Differences:
    """Of all tests of the process."""
    file: str | None = request.config.getoption("--execution-table")
    return Differences(None if file is None else Path(file))


@pytest.fixture(
    params=[
        "cpu",
        pytest.param("cuda", marks=pytest.mark.gpu),
        pytest.param("a100", marks=pytest.mark.slow),
        pytest.param("h100", marks=pytest.mark.slow),
    ]
)
def device(request: pytest.FixtureRequest, compiler: KeptCompiler, differences: Differences) -> str:
    """`cpu` with the interpreter, `cuda` for real; for a GPU's name as compiled for it, in the machine for PTX."""
    name: str = request.param
    if name not in ("cpu", "cuda"):
        return PtxDevice.of(name, compiler.workers, differences)
    if name == "cuda":
        import torch
        import triton

        # Kernels that make tensor descriptors ask Triton's launcher for memory to put them in.
        triton.set_allocator(lambda nbytes, alignment, stream: torch.empty(nbytes, dtype=torch.int8, device="cuda"))
    return name
