"""Targets by their names."""

from dataclasses import replace

from llmc.errors import TargetError, did_you_mean
from llmc.targets.here import automatic_target, host_target
from llmc.targets.table import CPU_TARGETS, GPU_TARGETS, ONNXRUNTIME, REFERENCE, GpuTarget, Target


def known_targets() -> tuple[Target, ...]:
    """Return every target that can be named, best CPU first. `cpu` is the first of them that this machine can run."""
    return (*CPU_TARGETS, *GPU_TARGETS, REFERENCE, ONNXRUNTIME)


def resolve_target(name: str) -> Target:
    """The target of that name; `cpu` means this machine, `auto` its GPU or else its CPU. Raises TargetError."""
    if name == "cpu":
        return host_target()
    if not isinstance(name, str):
        raise TargetError(f"a target is named by a string, not {name!r}", at="target", fix="see `llmc targets`")
    if name == "auto":
        return automatic_target()
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
    """Return one target for several GPUs of a vendor, with the minimum of their capabilities."""
    targets = [resolve_target(name.strip()) for name in names.split(",")]
    members = tuple(target for target in targets if isinstance(target, GpuTarget))
    if len(members) < len(targets) or len({target.backend for target in members}) > 1:
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
        known = ", ".join(candidate.name for candidate in GPU_TARGETS)
        raise TargetError(f"{name} is not a GPU", at=f"target={name!r}", fix=f"name one of {known}")
    return target


def is_cpu_target(name: str) -> bool:
    """Whether a target's name is that of a CPU's instruction set."""
    return name in {target.name for target in CPU_TARGETS}
