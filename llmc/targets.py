"""The hardware table: what can be named as a target, its instruction set and its rates."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from llmc.errors import TargetError, did_you_mean
from llmc.links import (
    GLOO,
    INFINIBAND_HDR,
    INFINIBAND_NDR,
    NVLINK_3,
    NVLINK_4,
    NVLINK_5,
    PCIE_4,
    SHARED_MEMORY,
    XGMI_MI300,
    Links,
)

# Of processes on one machine's cores, and of machines.
_OF_CPUS = Links(SHARED_MEMORY, GLOO, size=64)


@dataclass(frozen=True)
class CpuTarget:
    """A CPU instruction-set level. features: flags as /proc/cpuinfo spells them, all needed to run the engine."""

    name: str
    machine: str | None
    features: frozenset[str]
    compiler_flags: tuple[str, ...]
    summary: str
    # No GPU's kernels.
    compiled: tuple[GpuTarget, ...] = ()
    links: Links = _OF_CPUS

    def has(self, feature: str) -> bool:
        """Whether kernels may use the feature."""
        return feature in self.features


@dataclass(frozen=True)
class _GraphTarget:
    """No code generation: others run the engine's graph."""

    name: str
    summary: str
    machine: None = None
    features: frozenset[str] = frozenset()
    compiled: tuple[GpuTarget, ...] = ()
    links: Links = _OF_CPUS


class ReferenceTarget(_GraphTarget):
    """torch runs the graph eagerly. Slow and right; needs no compiler."""


class OnnxTarget(_GraphTarget):
    """The graph is an ONNX model, which onnxruntime runs by its own kernels."""


@dataclass(frozen=True)
class GpuTarget:
    """A GPU that kernels are compiled for. Rates are of the data sheets, dense, without sparsity.

    backend, arch, warp_size: what Triton's compiler asks for; arch is a compute capability (90) or a gfx name.
    memory_bytes, shared_memory_per_block: bytes. bandwidth: bytes a second. Rates: FLOP a second of matrix
    instructions that accumulate in fp32 (fp32_rate: of plain fp32 arithmetic); fp8_rate is None without fp8 units.
    has_tma: whether tensor descriptors become bulk copies. links: of several such GPUs. launch: seconds that a launch
    adds between two others of a CUDA graph. members: of a target that stands for several GPUs, which promises no more
    than each of them has.
    """

    name: str
    backend: Literal["cuda", "hip"]
    arch: int | str
    warp_size: int
    sm_count: int
    memory_bytes: int
    bandwidth: float
    bf16_rate: float
    fp16_rate: float
    fp8_rate: float | None
    fp32_rate: float
    shared_memory_per_block: int
    has_tma: bool
    summary: str
    links: Links
    launch: float = 2e-6
    members: tuple[GpuTarget, ...] = ()
    # Of the processor beside the GPU nothing is asked.
    machine: None = None
    features: frozenset[str] = frozenset()

    @property
    def compiled(self) -> tuple[GpuTarget, ...]:
        """The GPUs that kernels are compiled for: the members of several at once, or this one."""
        return self.members or (self,)

    @property
    def binary_kind(self) -> str:
        """The suffix of a compiled kernel's file."""
        return "cubin" if self.backend == "cuda" else "hsaco"

    @property
    def arch_name(self) -> str:
        """`sm_90` or `gfx942`: the instruction set, which several targets can share."""
        return f"sm_{self.arch}" if self.backend == "cuda" else str(self.arch)

    def rate(self, dtype: str) -> float:
        """FLOP a second of matrix products of a safetensors dtype."""
        return {"F32": self.fp32_rate, "F16": self.fp16_rate, "BF16": self.bf16_rate}[dtype]


Target = CpuTarget | GpuTarget | ReferenceTarget | OnnxTarget

_V3 = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_V4_BF16 = _V4 | {"avx512_bf16", "avx512_vnni", "avx512_vbmi2"}
_V4_AMX = _V4_BF16 | {"amx_tile", "amx_bf16", "amx_int8"}
_BF16_FLAGS = ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni", "-mavx512vbmi2", "-mprefer-vector-width=512")

CPU_TARGETS: tuple[CpuTarget, ...] = (
    CpuTarget(
        "cpu-x86-64-v4-amx",
        "x86_64",
        _V4_AMX,
        (*_BF16_FLAGS, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
        "AVX-512 and the matrix registers of AMX: Sapphire Rapids and later Xeons",
    ),
    CpuTarget(
        "cpu-x86-64-v4-bf16",
        "x86_64",
        _V4_BF16,
        _BF16_FLAGS,
        "AVX-512 with BF16, VNNI and VBMI2: Zen 4 and later",
    ),
    CpuTarget(
        "cpu-x86-64-v4",
        "x86_64",
        _V4,
        ("-march=x86-64-v4", "-mprefer-vector-width=512"),
        "AVX-512: Skylake-X and later",
    ),
    CpuTarget("cpu-x86-64-v3", "x86_64", _V3, ("-march=x86-64-v3",), "AVX2 and FMA: Haswell, Zen and later"),
    CpuTarget(
        "cpu-portable",
        None,
        frozenset(),
        (),
        "plain C++, any 64-bit machine of the same family as the builder",
    ),
)
REFERENCE = ReferenceTarget("reference", "no compiler: runs the graph in torch, slowly; needs torch at run time")
ONNXRUNTIME = OnnxTarget("onnxruntime", "no compiler: an ONNX model in fp32, which onnxruntime runs")


# By compute capability; other GPUs have no NVLink.
_HGX: Mapping[int, Links] = MappingProxyType(
    {
        80: Links(NVLINK_3, INFINIBAND_HDR, size=8),
        90: Links(NVLINK_4, INFINIBAND_NDR, size=8),
        100: Links(NVLINK_5, INFINIBAND_NDR, size=8),
    }
)


def _nvidia(
    name: str,
    arch: int,
    sm_count: int,
    memory_gb: int,
    bandwidth: float,
    bf16_rate: float,
    fp8_rate: float | None,
    fp32_rate: float,
    summary: str,
) -> GpuTarget:
    shared_kib = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227}[arch]
    links = _HGX.get(arch, Links(PCIE_4, INFINIBAND_HDR, size=8))
    memory, shared = memory_gb * 10**9, shared_kib * 1024
    rates = (bf16_rate, bf16_rate, fp8_rate, fp32_rate)
    return GpuTarget(name, "cuda", arch, 32, sm_count, memory, bandwidth, *rates, shared, arch >= 90, summary, links)


GPU_TARGETS: tuple[GpuTarget, ...] = (
    _nvidia("h100", 90, 132, 80, 3.35e12, 989e12, 1979e12, 66.9e12, "NVIDIA H100 SXM (sm_90), 80 GB at 3.35 TB/s"),
    _nvidia("h200", 90, 132, 141, 4.8e12, 989e12, 1979e12, 66.9e12, "NVIDIA H200 SXM (sm_90), 141 GB at 4.8 TB/s"),
    _nvidia("a100", 80, 108, 80, 2.039e12, 312e12, None, 19.5e12, "NVIDIA A100 SXM (sm_80), 80 GB at 2.04 TB/s"),
    _nvidia("b200", 100, 148, 180, 7.7e12, 2250e12, 4500e12, 75e12, "NVIDIA B200 (sm_100), 180 GB at 7.7 TB/s"),
    _nvidia("a10", 86, 72, 24, 600e9, 125e12, None, 31.2e12, "NVIDIA A10 (sm_86), 24 GB at 600 GB/s"),
    _nvidia("l4", 89, 58, 24, 300e9, 121e12, 242e12, 30.3e12, "NVIDIA L4 (sm_89), 24 GB at 300 GB/s"),
    _nvidia("l40s", 89, 142, 48, 864e9, 362e12, 733e12, 91.6e12, "NVIDIA L40S (sm_89), 48 GB at 864 GB/s"),
    _nvidia("rtx4090", 89, 128, 24, 1008e9, 165e12, 330e12, 82.6e12, "NVIDIA RTX 4090 (sm_89), 24 GB at 1.01 TB/s"),
    GpuTarget(
        "mi300x",
        "hip",
        "gfx942",
        64,
        304,
        192 * 10**9,
        5.3e12,
        1307e12,
        1307e12,
        2615e12,
        163.4e12,
        64 * 1024,
        False,
        "AMD MI300X (gfx942), 192 GB at 5.3 TB/s; compiled offline, not run on one yet",
        Links(XGMI_MI300, INFINIBAND_NDR, size=8),
    ),
)


def known_targets() -> tuple[Target, ...]:
    """Every target that can be named, best CPU first. `cpu` is the first of them that this machine can run."""
    return (*CPU_TARGETS, *GPU_TARGETS, REFERENCE, ONNXRUNTIME)


def resolve_target(name: str) -> Target:
    """The target of that name; `cpu` means this machine, `auto` its GPU or else its CPU. Raises TargetError."""
    if name == "cpu":
        return host_target()
    if not isinstance(name, str):
        raise TargetError(f"a target is named by a string, not {name!r}", at="target", fix="see `llmc targets`")
    if name == "auto":
        return _automatic_target()
    if "," in name:
        return _common_target(name)
    for target in known_targets():
        if target.name == name:
            return target
    names = ["cpu", "auto", *(t.name for t in known_targets())]
    raise TargetError(
        f"unknown target {name!r}",
        at=f"target={name!r}",
        fix=f"{did_you_mean(name, names)}known targets: {', '.join(names)}",
    )


def _common_target(names: str) -> GpuTarget:
    """One target for several GPUs of a vendor: the least of what they have."""
    found = [resolve_target(name.strip()) for name in names.split(",")]
    members = tuple(target for target in found if isinstance(target, GpuTarget))
    if len(members) < len(found) or len({target.backend for target in members}) > 1:
        raise TargetError(
            f"{names} cannot share an engine: only GPUs of one vendor can",
            at=f"target={names!r}",
            fix="build one engine for each",
        )
    least = min(members, key=lambda target: (int(str(target.arch).removeprefix("gfx")), target.shared_memory_per_block))
    return replace(
        least,
        name=",".join(target.name for target in members),
        memory_bytes=min(target.memory_bytes for target in members),
        shared_memory_per_block=min(target.shared_memory_per_block for target in members),
        has_tma=all(target.has_tma for target in members),
        summary="; ".join(target.summary for target in members),
        members=members,
    )


def is_gpu_target(name: str) -> bool:
    """Whether a target's name is that of a GPU, or of several."""
    return set(name.split(",")) <= {target.name for target in GPU_TARGETS}


def gpu_target(name: str) -> GpuTarget:
    """The GPU, or the several, of that name. Raises TargetError for a target of another kind."""
    target = resolve_target(name)
    if not isinstance(target, GpuTarget):
        known = ", ".join(each.name for each in GPU_TARGETS)
        raise TargetError(f"{name} is no GPU", at=f"target={name!r}", fix=f"name one of {known}")
    return target


def is_cpu_target(name: str) -> bool:
    """Whether a target's name is that of a CPU's instruction set."""
    return name in {target.name for target in CPU_TARGETS}


def cpu_target_here(name: str) -> CpuTarget | None:
    """The CPU target of that name, if this machine has what it needs; None for others."""
    target = next((each for each in CPU_TARGETS if each.name == name), None)
    return None if target is None or missing_features(target) else target


def lacking_here(target: Target, device: GpuTarget | None) -> str | None:
    """What this machine lacks to run engines for a target, None for nothing. device: its GPU's target."""
    if isinstance(target, GpuTarget):
        return None if device is not None and device.arch_name == target.arch_name else "builds only"
    missing = missing_features(target) if isinstance(target, CpuTarget) else ()
    return f"lacks {', '.join(missing)}" if missing else None


def host_target() -> CpuTarget:
    """The best CPU target that this machine can run."""
    machine, features = os.uname().machine, host_features()
    return next(t for t in CPU_TARGETS if t.machine in (None, machine) and t.features <= features)


def device_target() -> GpuTarget | None:
    """The target of this machine's first GPU, as torch sees it; None if there is none that is known."""
    device = _first_device()
    return None if device is None else match_device(device.name, device.capability, is_hip=device.is_hip)


@dataclass(frozen=True)
class _Device:
    name: str
    capability: tuple[int, int]
    is_hip: bool


def _first_device() -> _Device | None:
    """This machine's first GPU as torch sees it, None without one or without torch."""
    try:
        import torch
    except ModuleNotFoundError:
        return None

    if not torch.cuda.is_available():
        return None
    name: str = torch.cuda.get_device_properties(0).name
    return _Device(name, torch.cuda.get_device_capability(0), torch.version.hip is not None)


def _automatic_target() -> Target:
    """This machine's GPU, or its CPU if it has no GPU. A GPU that is in no target's reach is not passed over."""
    device = _first_device()
    if device is None:
        return host_target()
    target = match_device(device.name, device.capability, is_hip=device.is_hip)
    if target is not None:
        return target
    arch = "" if device.is_hip else f" (sm_{device.capability[0]}{device.capability[1]})"
    raise TargetError(
        f"this machine's GPU, {device.name}{arch}, is none that llmc has a target for",
        at="target=auto",
        fix="build for the CPU: target=cpu; or for the GPU of `llmc targets` that is most like it, whose kernels are "
        "compiled for this one when the engine is loaded, if they can be",
    )


def match_device(name: str, capability: tuple[int, int], *, is_hip: bool) -> GpuTarget | None:
    """The target that a device's name says, or else the slowest of its instruction set; None for an unknown one."""
    words, arch = name.lower().replace(" ", ""), capability[0] * 10 + capability[1]
    # torch gives an AMD GPU a capability too, but it does not say which gfx that is.
    same = [t for t in GPU_TARGETS if (t.backend == "hip" if is_hip else t.arch == arch)]
    named = [t for t in same if t.name in words]
    if named:
        return max(named, key=lambda t: len(t.name))
    return None if is_hip else min(same, key=lambda t: t.bandwidth, default=None)


def host_features() -> frozenset[str]:
    """This machine's CPU flags as Linux reports them; empty where there is no /proc/cpuinfo."""
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
    """What this machine lacks to run the target, sorted; a foreign machine type counts as one."""
    machine = os.uname().machine
    foreign = () if target.machine in (None, machine) else (f"{target.machine} processor (this is {machine})",)
    return (*foreign, *sorted(target.features - host_features()))
