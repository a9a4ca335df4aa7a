"""The hardware table: what can be named as a target, its instruction set and its rates."""

from __future__ import annotations

import difflib
import platform
from dataclasses import dataclass
from pathlib import Path

from llmc.errors import TargetError


@dataclass(frozen=True)
class CpuTarget:
    """A CPU instruction-set level. features: flags as /proc/cpuinfo spells them, all needed to run the engine."""

    name: str
    machine: str | None
    features: frozenset[str]
    compiler_flags: tuple[str, ...]
    summary: str

    def has(self, feature: str) -> bool:
        """Whether kernels may use the feature."""
        return feature in self.features


@dataclass(frozen=True)
class ReferenceTarget:
    """No code generation: the engine's graph runs eagerly in torch. Slow and right; needs no compiler."""

    name: str
    summary: str


Target = CpuTarget | ReferenceTarget

_V3 = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_V4_BF16 = _V4 | {"avx512_bf16", "avx512_vnni"}

CPU_TARGETS: tuple[CpuTarget, ...] = (
    CpuTarget(
        "cpu-x86-64-v4-bf16",
        "x86_64",
        _V4_BF16,
        ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni", "-mprefer-vector-width=512"),
        "AVX-512 with BF16 and VNNI: Zen 4 and later, Cooper Lake, Sapphire Rapids and later",
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


def known_targets() -> tuple[Target, ...]:
    """Every target that can be named, best CPU first. `cpu` is the first of them that this machine can run."""
    return (*CPU_TARGETS, REFERENCE)


def resolve_target(name: str) -> Target:
    """The target of that name; `cpu` means this machine. Raises TargetError for an unknown one."""
    if name == "cpu":
        return host_target()
    if not isinstance(name, str):
        raise TargetError(f"a target is named by a string, not {name!r}", at="target", fix="see `llmc targets`")
    for target in known_targets():
        if target.name == name:
            return target
    names = ["cpu", *(t.name for t in known_targets())]
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise TargetError(f"unknown target {name!r}", at=f"target={name!r}", fix=f"{hint}known targets: {', '.join(names)}")


def host_target() -> CpuTarget:
    """The best CPU target that this machine can run."""
    machine, features = platform.machine(), host_features()
    return next(t for t in CPU_TARGETS if t.machine in (None, machine) and t.features <= features)


def host_features() -> frozenset[str]:
    """This machine's CPU flags as Linux reports them; empty where there is no /proc/cpuinfo."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return frozenset()
    line = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return frozenset(line.partition(":")[2].split())


def missing_features(target: CpuTarget) -> tuple[str, ...]:
    """What this machine lacks to run the target, sorted; a foreign machine type counts as one."""
    machine = platform.machine()
    foreign = () if target.machine in (None, machine) else (f"{target.machine} processor (this is {machine})",)
    return (*foreign, *sorted(target.features - host_features()))
