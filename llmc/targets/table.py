"""The hardware table: what can be named as a target, its instruction set and its rates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from llmc.targets.links import (
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

# Links between processes on one machine's cores, and between machines.
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

    backend, arch, warp_size: arguments of Triton's compiler; arch is a compute capability (90) or a gfx name.
    memory_bytes, shared_memory_per_block: bytes. bandwidth: bytes per second. Rates: FLOP per second of matrix
    instructions that accumulate in fp32 (fp32_rate: the rate of plain fp32 arithmetic); fp8_rate is None without fp8
    units. has_tma: whether tensor descriptors become bulk copies. links: links between several such GPUs. launch:
    seconds that a launch adds between two others of a CUDA graph. members: the GPUs that a common target covers; it has
    the minimum of their capabilities.
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
    # The host processor may be of any kind.
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
    _nvidia(
        "h100-pcie", 90, 114, 80, 2.04e12, 756e12, 1513e12, 51.2e12, "NVIDIA H100 PCIe (sm_90), 80 GB at 2.04 TB/s"
    ),
    _nvidia("h100-nvl", 90, 132, 94, 3.94e12, 835e12, 1671e12, 60e12, "NVIDIA H100 NVL (sm_90), 94 GB at 3.94 TB/s"),
    _nvidia("gh200", 90, 132, 96, 4.0e12, 989e12, 1979e12, 66.9e12, "NVIDIA GH200 (sm_90), 96 GB at 4.0 TB/s"),
    _nvidia("h200", 90, 132, 141, 4.8e12, 989e12, 1979e12, 66.9e12, "NVIDIA H200 SXM (sm_90), 141 GB at 4.8 TB/s"),
    _nvidia("a100", 80, 108, 80, 2.039e12, 312e12, None, 19.5e12, "NVIDIA A100 SXM (sm_80), 80 GB at 2.04 TB/s"),
    _nvidia("a100-40gb", 80, 108, 40, 1.555e12, 312e12, None, 19.5e12, "NVIDIA A100 (sm_80), 40 GB at 1.56 TB/s"),
    _nvidia("b200", 100, 148, 180, 7.7e12, 2250e12, 4500e12, 75e12, "NVIDIA B200 (sm_100), 180 GB at 7.7 TB/s"),
    _nvidia("a10", 86, 72, 24, 600e9, 125e12, None, 31.2e12, "NVIDIA A10 (sm_86), 24 GB at 600 GB/s"),
    _nvidia("l4", 89, 58, 24, 300e9, 121e12, 242e12, 30.3e12, "NVIDIA L4 (sm_89), 24 GB at 300 GB/s"),
    _nvidia("l40", 89, 142, 48, 864e9, 181e12, 362e12, 90.5e12, "NVIDIA L40 (sm_89), 48 GB at 864 GB/s"),
    _nvidia("l40s", 89, 142, 48, 864e9, 362e12, 733e12, 91.6e12, "NVIDIA L40S (sm_89), 48 GB at 864 GB/s"),
    _nvidia("rtx3090", 86, 82, 24, 936e9, 71e12, None, 35.6e12, "NVIDIA RTX 3090 (sm_86), 24 GB at 936 GB/s"),
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
