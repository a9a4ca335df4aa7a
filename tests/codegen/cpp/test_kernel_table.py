"""The table names functions that there are."""

from __future__ import annotations

from llmc.codegen.cpp.kernel_api import kernel_api
from llmc.codegen.cpp.kernel_table import KERNELS


def test_every_kernel_has_functions() -> None:
    families = {kernel.family for kernel in KERNELS.values() if isinstance(kernel.family, str)}
    functions = kernel_api().kernels
    assert [family for family in families if not any(f.startswith(f"llmc_{family}") for f in functions)] == []
    assert len(families) > 5
