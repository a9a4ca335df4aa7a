"""Known GPUs, for tests that need what is known of one and not the device itself."""

from __future__ import annotations

import pytest
from _pytest.mark import ParameterSet

from llmc.targets import GpuTarget, resolve_target

# Those whose machine code differs: one of each instruction set.
EACH_KIND_OF_GPU = ("a100", "rtx4090", "h100", "b200", "mi300x")


def each_kind_of_gpu(*quick: str) -> list[ParameterSet]:
    """All of them; those that are not named wait for the slow tests. Compiling a kernel takes seconds for each."""
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in EACH_KIND_OF_GPU]


def gpu_target(name: str) -> GpuTarget:
    """The GPU target of that name."""
    target = resolve_target(name)
    assert isinstance(target, GpuTarget), f"{name} is no GPU"
    return target


def matrix_instruction(name: str) -> str:
    """How the machine code of that GPU says that matrices are multiplied."""
    return {"h100": "wgmma.mma_async", "b200": "tcgen05.mma", "mi300x": "v_mfma"}.get(name, "mma.sync")
