"""What compiles kernels for the tests of the PTX machine."""

from __future__ import annotations

import pytest

from tests.codegen.triton.ptx_device import PtxDevice
from tests.kept_compiler import KeptCompiler


@pytest.fixture(params=["a100", "h100"])
def gpu(request: pytest.FixtureRequest, compiler: KeptCompiler) -> PtxDevice:
    """A GPU whose kernels are executed on the CPU."""
    return PtxDevice.of(request.param, compiler.workers)
