"""Which targets this machine can run."""

import ctypes
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from llmc.errors import TargetError
from llmc.targets.table import CPU_TARGETS, GPU_TARGETS, CpuTarget, GpuTarget, Target

# Its first line has the driver's version.
_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


def cpu_target_here(name: str) -> CpuTarget | None:
    """The CPU target of that name, if this machine has what it needs; None for others."""
    target = next((candidate for candidate in CPU_TARGETS if candidate.name == name), None)
    return None if target is None or missing_features(target) else target


def lacking_here(target: Target, device: GpuTarget | None) -> str | None:
    """The missing requirement to run engines for a target on this machine; None if there is none. device: the target of
    its GPU."""
    if isinstance(target, GpuTarget):
        return None if device is not None and device.arch_name == target.arch_name else "builds only"
    missing = missing_features(target) if isinstance(target, CpuTarget) else ()
    return f"lacks {', '.join(missing)}" if missing else None


def host_target() -> CpuTarget:
    """The best CPU target that this machine can run."""
    machine, features = os.uname().machine, host_features()
    return next(t for t in CPU_TARGETS if t.machine in (None, machine) and t.features <= features)


def device_target() -> GpuTarget | None:
    """The target of this machine's first GPU, as torch sees it; None if it is not known."""
    device = _first_device()
    return None if device is None else match_device(device.name, device.capability, is_hip=device.is_hip)


@dataclass(frozen=True)
class _Device:
    name: str
    capability: tuple[int, int]
    is_hip: bool


def _first_device() -> _Device | None:
    """Return this machine's first GPU as torch sees it; None without one or without torch."""
    try:
        import torch
    except ModuleNotFoundError:
        return None

    if not torch.cuda.is_available():
        return None
    name: str = torch.cuda.get_device_properties(0).name
    return _Device(name, torch.cuda.get_device_capability(0), torch.version.hip is not None)


def automatic_target() -> Target:
    """Return the target of this machine's GPU, or of its CPU if it has no GPU. A GPU that no target supports is an
    error."""
    device = _first_device()
    if device is None:
        _check_driver()
        return host_target()
    target = match_device(device.name, device.capability, is_hip=device.is_hip)
    if target is not None:
        return target
    arch = "" if device.is_hip else f" (sm_{device.capability[0]}{device.capability[1]})"
    raise TargetError(
        f"this machine's GPU, {device.name}{arch}, has no target in llmc",
        at="target=auto",
        fix="build for the CPU: target=cpu; or for the GPU of `llmc targets` that is most like it, whose kernels are "
        "compiled for this one when the engine is loaded, if they can be",
    )


def _check_driver() -> None:
    """Raise TargetError if this machine has a driver for NVIDIA's GPUs that torch does not use."""
    try:
        version = _NVIDIA_DRIVER.read_text(encoding="utf-8", errors="replace").partition("\n")[0]
        import torch
    except (OSError, ModuleNotFoundError):
        return
    if torch.version.cuda is None:
        problem, fix = "is built without CUDA", "install a torch with CUDA"
    else:
        problem = f"is built for CUDA {torch.version.cuda} and finds no GPU that it can use"
        fix = "update the driver, or install a torch for an older CUDA; see what torch.cuda.init() raises"
    raise TargetError(
        f"this machine has a driver for NVIDIA's GPUs ({version}), but torch {torch.__version__} {problem}",
        at="target=auto",
        fix=f"{fix}; or build for the CPU: target=cpu",
    )


def match_device(name: str, capability: tuple[int, int], *, is_hip: bool) -> GpuTarget | None:
    """The target that a device's name says, or else the slowest of its instruction set; None for an unknown one."""
    words, arch = name.lower().replace(" ", ""), capability[0] * 10 + capability[1]
    # torch gives an AMD GPU a capability too, but it does not say which gfx that is.
    candidates = [t for t in GPU_TARGETS if (t.backend == "hip" if is_hip else t.arch == arch)]
    named = [t for t in candidates if all(part in words for part in t.name.split("-"))]
    if named:
        return max(named, key=lambda t: len(t.name))
    return None if is_hip else min(candidates, key=lambda t: t.bandwidth, default=None)


def host_features() -> frozenset[str]:
    """Return this machine's CPU flags as Linux reports them; empty if there is no /proc/cpuinfo."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return frozenset()
    line = next((line for line in text.splitlines() if line.startswith("flags")), "")
    flags = frozenset(line.partition(":")[2].split())
    return flags if _has_tiles() else frozenset(flag for flag in flags if not flag.startswith("amx_"))


def _has_tiles() -> bool:
    """Whether this process, and not only the processor, has AMX: the system saves tile registers only on demand.

    Asks for that, as every process must before its first tile instruction; it stays granted.
    Source: Documentation/arch/x86/xstate.rst of Linux, ARCH_REQ_XCOMP_PERM.
    """
    if os.uname().machine != "x86_64" or sys.platform != "linux":
        return False
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return bool(ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0)


def missing_features(target: CpuTarget) -> tuple[str, ...]:
    """The features that this machine lacks to run the target, sorted; a different machine type counts as one."""
    machine = os.uname().machine
    foreign = () if target.machine in (None, machine) else (f"{target.machine} processor (this is {machine})",)
    return (*foreign, *sorted(target.features - host_features()))
