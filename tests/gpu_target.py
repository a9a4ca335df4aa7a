"""Known GPUs, for tests that need what is known of one and not the device itself."""

from __future__ import annotations

from llmc.targets import GpuTarget, resolve_target


def gpu_target(name: str) -> GpuTarget:
    """The GPU target of that name."""
    target = resolve_target(name)
    assert isinstance(target, GpuTarget), f"{name} is no GPU"
    return target
